"""Results of DALI's operators that other functions compute on the CPU.

A graph is defined by DALI's operators. `offer` notes a function that replaces the result of one of
them, and `choose` calls it when the graph is complete. States describe the graph before this, so
that they move between CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from nvidia.dali import Pipeline
from nvidia.dali.data_node import DataNode

from ..state.operators import Operator, graph_outputs, operators, operators_of

# Attributes of the pipeline.
_OFFERS, _DESCRIPTION = "_dalijax_offers", "_dalijax_description"
_SPLIT = "_conditional__Split"  # of an ``if`` in the graph; private in DALI


class _Offer(NamedTuple):
    """The arguments of `offer`."""

    node: DataNode
    images: DataNode
    replacement: Callable[[bool], DataNode] | None
    resized_by: str


class GraphDescription(NamedTuple):
    """What states contain about a graph.

    Attributes:
        operators: The operators, in order.
        outputs: The outputs of the graph, as `graph_outputs` returns them.
        resized_by: The implementation that resizes images on the CPU; "" without one.
    """

    operators: list[Operator]
    outputs: list[str]
    resized_by: str = ""


def offer(
    node: DataNode,
    images: DataNode,
    replacement: Callable[[bool], DataNode] | None,
    resized_by: str = "",
) -> None:
    """Notes that another node may replace a node, during the definition of a graph.

    Args:
        node: The result of DALI's operator.
        images: The images that it is computed from.
        replacement: Called when the graph is complete, with whether the node is the only one that
            uses the images. Returns a node of the same name and device. None: the node stays.
        resized_by: The implementation that resizes the images. States of another one are rejected,
            and those without one, e.g. of GPUs, are not.
    """
    offers = vars(Pipeline.current()).setdefault(_OFFERS, [])
    offers.append(_Offer(node, images, replacement, resized_by))


def description_of(pipeline: Pipeline) -> GraphDescription:
    """Returns the description of a built pipeline's graph."""
    found: GraphDescription | None = vars(pipeline).get(_DESCRIPTION)
    return found or GraphDescription(operators_of(pipeline), graph_outputs(pipeline))


def choose(pipeline: Pipeline) -> None:
    """Replaces nodes by those that were offered for them.

    Args:
        pipeline: A pipeline that was defined and is not built.
    """
    offers: list[_Offer] = vars(pipeline).pop(_OFFERS, [])
    if offers:
        used = {id(operator) for operator in operators(pipeline)}
        offers = [item for item in offers if id(item.node.source) in used]
    if not offers:
        return
    resized_by = next(filter(None, (item.resized_by for item in offers)), "")
    vars(pipeline)[_DESCRIPTION] = _description(pipeline)._replace(resized_by=resized_by)
    for item in reversed(offers):  # nodes that use others come first
        if item.replacement is None or any(map(_is_split, _inputs(item.node.source))):
            continue
        outputs = _outputs(pipeline)
        lists = [outputs, *(nodes for op in operators(pipeline) for nodes in _lists(op))]
        users = sum(getattr(x, "name", "") == item.images.name for nodes in lists for x in nodes)
        with pipeline:
            new = item.replacement(users == 1)
        for nodes in lists:
            nodes[:] = [new if node is item.node else node for node in nodes]
        pipeline.set_outputs(*outputs)


def _description(pipeline: Pipeline) -> GraphDescription:
    """Returns the description of the graph of a pipeline that is not built."""
    copy = Pipeline(pipeline.max_batch_size, pipeline.num_threads, pipeline.device_id)
    copy.set_outputs(*_outputs(pipeline))
    copy._sinks = [*pipeline._sinks]  # private in DALI: nodes without users that run, too
    return GraphDescription(operators_of(copy), graph_outputs(copy))


def _outputs(pipeline: Pipeline) -> list[Any]:
    """Returns the outputs of a pipeline that was defined."""
    nodes: Any = pipeline._graph_out  # private in DALI
    return [*nodes]


def _lists(operator: Any) -> list[list[Any]]:
    """Returns the lists of an operator's inputs; there are several for several sets of inputs."""
    nested = [nodes for nodes in operator.inputs if isinstance(nodes, list)]
    return nested or [operator.inputs]


def _inputs(operator: Any) -> list[Any]:
    return [node for nodes in _lists(operator) for node in nodes]


def _is_split(node: Any) -> bool:
    operator = getattr(getattr(node, "source", None), "_op", None)
    return getattr(operator, "schema_name", "") == _SPLIT
