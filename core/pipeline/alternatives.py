"""Results of DALI's operators that other functions compute, and inputs that are fed together.

A graph is defined by DALI's operators. `offer` notes a function that replaces the result of one of
them, and `choose` calls it when the graph is complete. States describe the graph before this, so
that they move between CPUs and GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from nvidia.dali import Pipeline
from nvidia.dali.data_node import DataNode

from ..state.operators import Operator, graph_outputs, operator_inputs, operators, operators_of

# Attributes of the pipeline.
_OFFERS, _DESCRIPTION = "_dalijax_offers", "_dalijax_description"
# The operators of an ``if`` in the graph; private in DALI.
_SPLIT, _MERGE = "_conditional__Split", "_conditional__Merge"


# Receives how many operators and outputs of the graph use each node, by the node's name.
Replacement = Callable[[Mapping[str, int]], DataNode]
# Receives the same, and returns the new nodes by the names of the nodes that they replace.
Replacements = Callable[[Mapping[str, int]], Mapping[str, DataNode]]


class _Offer(NamedTuple):
    """Nodes that others may replace; see `offer` and `offer_inputs`."""

    nodes: Sequence[DataNode]
    replacements: Replacements | None
    resized_by: str = ""


class GraphDescription(NamedTuple):
    """The description of a graph for states.

    Attributes:
        operators: The operators, in order.
        outputs: The outputs of the graph, as `graph_outputs` returns them.
        resized_by: The implementation that resizes images on the CPU; "" without one.
    """

    operators: list[Operator]
    outputs: list[str]
    resized_by: str = ""


def offer(node: DataNode, replacement: Replacement | None, resized_by: str = "") -> None:
    """Notes that another node may replace a node, during the definition of a graph.

    Args:
        node: The result of DALI's operator.
        replacement: Called when the graph is complete, if it still uses the node. Returns a node of
            the same name and device. None: the node stays.
        resized_by: The implementation that resizes the images. States of another implementation
            are rejected; states without one, e.g. of GPUs, are accepted.
    """
    replacements = None if replacement is None else lambda users: {node.name: replacement(users)}
    _offers().append(_Offer([node], replacements, resized_by))


def offer_inputs(nodes: Sequence[DataNode], replacements: Replacements) -> None:
    """Notes that other nodes may replace inputs of a graph, during its definition.

    Args:
        nodes: The inputs.
        replacements: Called after the functions of `offer`. Nodes that it does not return stay.
    """
    _offers().insert(0, _Offer(nodes, replacements))  # the first is called last


def _offers() -> list[_Offer]:
    found: list[_Offer] = vars(Pipeline.current()).setdefault(_OFFERS, [])
    return found


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
    ordered = operators(pipeline) if offers else []
    used, conditional = {*map(id, ordered)}, _in_branches(ordered)
    offers = [item for item in offers if any(id(node.source) in used for node in item.nodes)]
    if not offers:
        return
    description = _description(pipeline)
    resized_by = "dali" if any(item.resized_by for item in offers) else ""
    for item in reversed(offers):  # nodes that use others come first
        sources = {id(node.source) for node in item.nodes}
        if item.replacements is None or sources & conditional:
            continue
        outputs = _outputs(pipeline)
        lists = [outputs, *(nodes for op in operators(pipeline) for nodes in _lists(op))]
        users = Counter(getattr(node, "name", "") for nodes in lists for node in nodes)
        resized_by = item.resized_by or resized_by
        # The replacement of another node may compute the nodes, too.
        if not any(users[node.name] for node in item.nodes):
            continue
        with pipeline:
            new = item.replacements(users)
        for nodes in lists:
            nodes[:] = [_replaced(node, sources, new) for node in nodes]
        pipeline.set_outputs(*outputs)
    vars(pipeline)[_DESCRIPTION] = description._replace(resized_by=resized_by)


def _in_branches(ordered: Sequence[Any]) -> set[int]:
    """Returns the identifiers of the operators that run for a part of the batch.

    Args:
        ordered: The operators of a graph, in topological order.
    """
    found: set[int] = set()
    for operator in ordered:
        inputs = [node.source for node in operator_inputs(operator)]
        if _kind(operator) == _MERGE:  # in a branch if its predicate, the last input, is
            inputs = inputs[-1:]
        if any(id(source) in found or _kind(source) == _SPLIT for source in inputs):
            found.add(id(operator))
    return found


def _replaced(node: Any, sources: Set[int], new: Mapping[str, DataNode]) -> Any:
    """Returns a node or, if it comes from one of some operators, its replacement by its name.

    Args:
        node: The node.
        sources: The identifiers of the operators.
        new: The replacements; the result is on the device of the node.
    """
    if id(getattr(node, "source", None)) not in sources:
        return node
    found = new.get(node.name, node)
    same = found.device == node.device
    return found if same else DataNode(found.name, node.device, found.source)


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


def _kind(operator: Any) -> str:
    return str(getattr(getattr(operator, "_op", None), "schema_name", ""))
