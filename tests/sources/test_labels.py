"""Labels of files: the names and order of classes, and labels other than class numbers."""

import pickle
import unicodedata
import warnings

import numpy as np
import pytest

from dalijax import data_iterator
from dalijax.errors import StateError
from dalijax.sources import Arrays, Files, Mixture, Named, Selection

LISTS = np.empty(3, object)  # a column of a table
LISTS[:] = [[1, 0], [0, 1, 1], [1]]


@data_iterator(as_numpy=True, shuffle=False)
def labels(label):
    return {"label": label}


@pytest.fixture
def folder(tmp_path):
    """Returns a function that creates a class directory with a file for each name."""

    def make(root, *names):
        for name in names:
            (tmp_path / root / name).mkdir(parents=True)
            (tmp_path / root / name / "1.jpg").write_bytes(name.encode())
        return str(tmp_path / root)

    return make


def by_class(source):
    """Returns the label of each class directory, from the batch of an iterator."""
    batch = next(labels(source=Named(source, "name"), batch_size=len(source)))
    names = [str(name).split("/")[-2] for name in batch["name"]]
    return dict(zip(names, batch["label"].tolist(), strict=True))


def test_validation_data_without_a_class_have_the_labels_of_the_training_data(folder):
    train = Files(folder("train", "cat", "dog", "fox"))
    val = folder("val", "dog", "fox")
    assert by_class(Files(val)) == {"dog": 0, "fox": 1}
    names = list(train.classes), np.array(train.classes), iter(train.classes)
    wrapped = Selection(train, [0]), Named(Selection(train, [0])), Mixture([(train, 1)])
    for classes in (train, *names, *wrapped):
        source = Files(val, classes=classes)
        assert source.classes == train.classes == ("cat", "dog", "fox")
        assert by_class(pickle.loads(pickle.dumps(source))) == {"dog": 1, "fox": 2}
    assert by_class(Files(val, classes=["fox", "dog"])) == {"dog": 1, "fox": 0}


def test_classes_are_a_part_of_the_identity(folder):
    root = folder("val", "dog", "fox")
    first, second = Files(root), Files(root, classes=["cat", "dog", "fox"])
    assert first.identity() != second.identity()
    # Names without records have no effect.
    assert first.identity() == Files(root, classes=["dog", "fox", "owl"]).identity()
    state = labels(source=first, batch_size=2).get_state()
    with pytest.raises(StateError, match="records"):
        labels(source=second, batch_size=2).set_state(state)


def test_class_directories_that_classes_lack_are_named(folder, tmp_path):
    root = folder("val", "dog", "fox", "owl")
    text = r"classes= lacks 'fox', 'owl' of the class directories in .*/val/: its names are 'dog'\."
    with pytest.raises(ValueError, match=text):
        Files(root, classes=["dog"])
    (tmp_path / "val/empty").mkdir()  # an empty class directory is a class, too
    with pytest.raises(ValueError, match="lacks 'empty' of"):
        Files(root, classes=["dog", "fox", "owl"])
    accent = folder("accent", unicodedata.normalize("NFD", "é"))
    for root, classes in ((accent, ["é"]), (root, ["Dog", "empty", "fox", "owl"])):
        with pytest.raises(
            ValueError, match=r"'(e\\u0301|dog)' and '(\\xe9|Dog)' .* differ in case"
        ):
            Files(root, classes=classes)


@pytest.mark.parametrize(
    "classes, error, text",
    (
        ("dog", TypeError, "not 'dog'. Pass a list such as"),
        ({"dog": 0}, TypeError, r"Pass sorted\(d, key=d.get\)"),
        ({"dog"}, TypeError, "names in the order"),
        ([1, 2], TypeError, r"not \[1, 2\]"),
        (Arrays({"x": np.arange(2)}), TypeError, "or a source with class directories"),
        (3, TypeError, "not 3"),
        ([], ValueError, "has no names"),
        (["dog", "cat", "dog"], ValueError, "contains 'dog' 2 times"),
    ),
)
def test_other_classes_are_refused(classes, error, text, folder):
    with pytest.raises(error, match=text):
        Files(folder("val", "dog"), classes=classes)


def test_classes_require_labels(folder):
    root = folder("val", "dog")
    flat = Files(f"{root}/dog")
    with pytest.raises(ValueError, match="has no names of classes"):
        Files(root, classes=flat)
    with pytest.raises(ValueError, match="requires class directories, but .*/dog/ has none"):
        Files(f"{root}/dog", classes=["dog"])
    with pytest.raises(TypeError, match="requires labels="):
        Files(paths=f"{root}/dog/1.jpg", classes=["dog"])


def test_class_directories_in_another_order_than_their_numbers_are_reported(folder):
    names = [str(k) for k in range(12)]
    root = folder("numbers", *names)
    with pytest.warns(UserWarning, match=r"label 2 is the class directory '10' of") as caught:
        source = Files(root)
    assert by_class(source)["10"] == 2
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="label 0 is the class directory 'c10x'"):
        Files(folder("c", "c9x", "c10x"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert by_class(Files(root, classes=names)) == {name: int(name) for name in names}
        Files(root, classes=sorted(names))
        for k, others in enumerate((("01", "02", "10"), ("dc-10", "dc-9a"), ("a9", "b10"), ("9",))):
            Files(folder(f"others{k}", *others))


def test_a_mixture_has_a_single_label_for_each_class(folder):
    a, b, c = (
        Files(folder(name, *names))
        for name, names in (
            ("a", ("cat", "dog")),
            ("b", ("dog", "fox")),
            ("c", ("cat", "dog", "fox")),
        )
    )
    unnamed = Files(paths=[a.name(0)], labels=[1])
    text = (
        r"label 0 is 'cat' in source 0 of the mixture, but 'dog' in source 1.*"
        r"as classes=\[\.\.\.\]: 'cat', 'dog', 'fox'"
    )
    for sources in ((a, b), (a, Selection(b, [1]))):
        mixture = Mixture([(source, 1) for source in sources])
        assert mixture.classes == ()
        for source in (mixture, Named(mixture)):
            with pytest.raises(ValueError, match=text):
                labels(source=source, batch_size=2)
        data_iterator(lambda data: data, ["x"])(source=mixture, batch_size=2)  # without labels
    with pytest.raises(ValueError, match="label 0 is 'cat' in source 1 .* but 'dog' in source 2"):
        named = [(Named(source), 1) for source in (unnamed, a, b)]
        labels(source=Mixture(named), batch_size=2)
    same = Files(folder("d", "dog", "fox"), classes=c)
    for sources in ((c, same), (a, c), (c, a, unnamed), (unnamed, unnamed)):
        mixture = Mixture([(source, 1) for source in sources])
        assert mixture.classes == (() if sources[0] is unnamed else c.classes)
        next(labels(source=mixture, batch_size=2))
    assert by_class(Mixture([(c, 3), (same, 2)])) == {"cat": 0, "dog": 1, "fox": 2}


@pytest.mark.parametrize(
    "given, expected",
    (
        ([0.5, 1, -2], np.array([0.5, 1, -2], np.float32)),
        (np.eye(3), np.eye(3, dtype=np.float32)),
        (np.eye(3, 2, dtype=bool), np.eye(3, 2, dtype=np.int32)),
        ([[1, 0], [0, 1], [1, 1]], np.array([[1, 0], [0, 1], [1, 1]], np.int32)),
        ([[0.5, np.nan]] * 3, np.array([[0.5, np.nan]] * 3, np.float32)),
        (np.array([2, 1, 0], object), np.array([2, 1, 0], np.int32)),
    ),
)
def test_labels_are_numbers_or_vectors(given, expected, folder):
    root = folder("files", "a", "b", "c")
    source = Files(paths=[f"{root}/{name}/1.jpg" for name in "abc"], labels=given)
    assert source.fields["label"].dtype == expected.dtype
    assert source.fields["label"].ndim == expected.ndim - 1
    batch = next(labels(source=Mixture([(source, 1)]), batch_size=3))["label"]
    rows = sorted(np.atleast_2d(batch.T).T.tolist())
    np.testing.assert_array_equal(rows, sorted(np.atleast_2d(expected.T).T.tolist()))
    assert batch.dtype == expected.dtype and batch.shape == expected.shape


def test_labels_may_be_names_of_classes(folder):
    root = folder("files", "a", "b", "c")
    paths = [f"{root}/{name}/1.jpg" for name in "abc"]
    for names in (["b", "a", "b"], np.array(["b", "a", "b"]), np.array(["b", "a", "b"], object)):
        source = Files(paths=paths, labels=names, classes=["c", "b", "a"])
        assert source.read(np.arange(3), ["label"])["label"].tolist() == [1, 2, 1]
    vectors = Files(paths=paths, labels=np.eye(3), classes=["c", "b", "a"])
    assert vectors.classes == ("c", "b", "a")


@pytest.mark.parametrize(
    "given, text, classes",
    (
        ([0, None, 1], r"labels\[1\] is None, .* omit paths without a label", None),
        ([0, np.nan, 1], r"labels\[1\] is nan, .* omit paths without a label", None),
        (np.ma.array([0, 1, 2], mask=[0, 1, 0]), r"labels\[1\] is None", None),
        ([[1], [1, 2], [3]], r"labels\[0\] is \[1\], .* shape \(paths, classes\)", None),
        (LISTS, r"labels\[0\] is \[1, 0\], .* shape \(paths, classes\)", None),
        (["a", "b", "a"], r"labels\[0\] is 'a', .* as classes=sorted", None),
        ([0, 1 << 40, 1], r"labels\[1\] is 1099511627776, .*renumber", None),
        ([0, 1 << 70, 1], r"labels\[1\] is 1180591620717411303424, .*renumber", None),
        ([0, 1e300, 1], r"labels\[1\] is 1e\+300, .*Scale", None),
        (np.zeros((3, 0)), r"labels of shape \(3, 0\)", None),
        (["a", None, "b"], r"labels\[1\] is None", ["a", "b"]),
        (["a", "c", "b"], "classes= lacks 'c' of the labels", ["a", "b"]),
        ([["a", "b"]] * 3, r"labels\[0\] is 'a'", ["a", "b"]),
        ([0, 1, 2], r"labels\[2\] is 2, but classes= has 2 names", ["a", "b"]),
        ([0, -1, 1], r"labels\[1\] is -1, but classes= has 2 names", ["a", "b"]),
        (np.eye(3), r"shape \(3, 3\) need 3 names, but classes= has 2", ["a", "b"]),
        ([0.5, 1, 0], "labels are floats, which have no classes", ["a", "b"]),
    ),
)
def test_other_labels_are_refused(given, text, classes, folder):
    root = folder("files", "a", "b", "c")
    with pytest.raises(ValueError, match=text):
        Files(paths=[f"{root}/{name}/1.jpg" for name in "abc"], labels=given, classes=classes)
