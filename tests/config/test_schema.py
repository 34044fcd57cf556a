"""The constructors' annotations as the schema of the configuration."""

from __future__ import annotations

import math

import pytest

from clipzoo.config import schema
from clipzoo.config.schema import UncheckableError, broken, class_constant, kind_of

HEAD = {
    "_target_": "clipzoo.heads.vector.ClipHead", "image_width": 8, "text_width": 8, "embed_width": 4,
    "temperature": 0.07, "max_scale": 100.0, "learnable_temperature": True,
}  # fmt: skip


def faults(**changes) -> list[str]:
    return list(schema.faults({"head": {**HEAD, **changes}}))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("embed_width", 4.5, "head.embed_width must be a whole number from 1 to 1000000000, not 4.5 (float)"),
        ("temperature", "hot", "head.temperature must be a number from 0.001 to 1000, not 'hot' (str)"),
        ("temperature", 0, "head.temperature must be a number from 0.001 to 1000, not 0 (int)"),
        ("image_width", "wide", "head.image_width must be a whole number from 1 to 1000000000, not 'wide' (str)"),
        ("learnable_temperature", 1, "head.learnable_temperature must be bool, not 1 (int)"),
        ("embed_width", True, "head.embed_width must be a whole number from 1 to 1000000000, not True (bool)"),
        ("temprature", 1.0, "head.temprature: ClipHead has no such argument; did you mean temperature?"),
        ("_target_", "clipzoo.heads.vector.ClipHed", "head._target_=clipzoo.heads.vector.ClipHed: clipzoo.heads.vector "
         "defines no ClipHed; did you mean ClipHead?"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_the_value_seen_and_the_nearest_right_one(key, value, expected):
    assert faults(**{key: value}) == [expected]


def test_a_missing_argument_is_named():
    assert faults() == []
    short = {key: value for key, value in HEAD.items() if key != "max_scale"}
    assert list(schema.faults({"head": short})) == ["head.max_scale is missing: ClipHead needs it"]


@pytest.mark.parametrize(
    ("annotation", "fitting", "unfitting"),
    [
        ("int | None", [1, None], ["1", 1.0]),
        ("float", [1, 1.5, -1e38], ["1", None, True, math.inf, math.nan, 1e39, 10**400]),
        ("AnyNumber", [1, 1.5, math.inf, math.nan], ["1", None, True]),
        ("NonNegative", [0, 1.5], [-1, math.nan, math.inf, "1"]),
        ("Probability", [0, 0.5, 1], [-0.1, 1.1, math.nan, True]),
        ("NonNegativeCount | None", [0, 5, None], [-1, 0.5, 10**30]),
        ("Annotated[int, MultipleOf(16)]", [16, 32], [17, 1.0]),
        ("typing.Annotated[Count, MultipleOf(16), 'in pixels']", [16, 32], [17, 0]),
        ("Annotated[float, Range(above=0, below=1)]", [0.5], [0, 1, math.nan, "a"]),
        ("OrderedPair", [[1, 2], [1, 1]], [[2, 1], [1], [1, 2, 3], [1, math.nan], 1]),
        ("tuple[float, float, float]", [[1, 2.5, -1]], [[1], [1, 2, math.inf], 1]),
        ("Positive", [1, 0.5], [0, -1.0, "1", True]),
        ("Count | None", [1, None], [0, -1, 0.5]),
        ("Literal['a', 'b']", ["a"], ["c", 1]),
        ("list[float]", [[1, 2.0], []], [1.0, ["a"]]),
        ("list[int] | None", [None, [1]], [[1.5]]),
        ("dict[str, Any]", [{}, {"a": 1}], [[], None, {1: 1}]),
        ("Names", [[], ["a", "b"]], [["a", "a"], [1], "a"]),
        ("tuple[float, float]", [[1, 2]], [[1], [1, 2, 3]]),
        ("Kernel", [{"_target_": "x.Y"}], [{"width": 1}, 1, None]),
        ("Optional['int']", [1, None], ["1", 1.0]),
        ("typing.Union[int, Literal['a'], None]", [1, "a", None], ["b", 1.5]),
        ("tuple[float, ...]", [[], [1, 2.5]], [["a"], 1.0]),
        ("'int | None'", [1, None], ["1"]),
        ("Callable[[int], int]", [{"_target_": "x.f"}], ["x.f", 1]),
        ("str | list[str | dict[str, Any]]", ["a", ["a", {"path": "b"}]], [1, [1]]),
    ],
)
def test_yaml_values_fit_annotations(annotation, fitting, unfitting):
    kind = kind_of(annotation)
    assert all(kind.admits(value) for value in fitting)
    assert not any(kind.admits(value) for value in unfitting)


@pytest.mark.parametrize("annotation", ["set[int]", "object", "list[complex]", "Iterable[int]", "~T", "list[int][0]"])
def test_an_annotation_that_cannot_be_checked_is_refused(annotation):
    with pytest.raises(UncheckableError):
        kind_of(annotation)


def test_classes_of_other_packages_are_checked_by_importing_them():
    assert list(schema.faults({"part": {"_target_": "fractions.Fraction", "numerator": 1, "denominater": 2}})) == [
        "part.denominater: Fraction has no such argument; did you mean denominator?"
    ]


@pytest.fixture
def part(tmp_path, monkeypatch):
    """Return the faults of the class `Part`, whose module is part of the package, or of another one."""

    def faults_of(source: str, package: str = "clipzoo", **values) -> list[str]:
        (tmp_path / "clipzoo").mkdir(exist_ok=True)
        (tmp_path / package / "parts.py" if package == "clipzoo" else tmp_path / f"{package}.py").write_text(source)
        (tmp_path / "clipzoo" / "bases.py").write_text(BASES)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(schema, "PACKAGE", tmp_path / "clipzoo")
        schema._names.cache_clear()
        target = "clipzoo.parts.Part" if package == "clipzoo" else f"{package}.Part"
        return list(schema.faults({"part": {"_target_": target, **values}}))

    yield faults_of
    schema._names.cache_clear()


BASES = """
from dataclasses import dataclass
class Base:
    def __init__(self, width: int, *, depth: 'int | None' = None): ...
class Between(Base):
    pass
@dataclass
class Record:
    size: int
"""


def test_a_constructor_inherited_from_another_module_is_checked(part):
    for source in (
        "from clipzoo.bases import Between\nclass Part(Between): ...",
        "from clipzoo import bases\nclass Part(bases.Between): ...",
        "from clipzoo.bases import Base as Part",
    ):
        assert part(source, width=1, depth=None) == []
        assert part(source, width="wide") == ["part.width must be a whole number, not 'wide' (str)"]
        assert part(source) == ["part.width is missing: Part needs it"]


def test_fields_of_an_inherited_dataclass_are_checked(part):
    imports = "from dataclasses import dataclass\nfrom clipzoo.bases import Record\n"
    source = f"{imports}@dataclass\nclass Part(Record):\n    name: str = ''"
    assert part(source, size=1, name="a") == []
    assert part(source, size=1.5) == ["part.size must be a whole number, not 1.5 (float)"]


def test_an_alias_of_the_module_is_expanded(part):
    alias = "from typing import Literal\nSide = Literal['left', 'right']\n"
    source = f"{alias}class Part:\n    def __init__(self, side: Side): ..."
    assert part(source, side="left") == []
    assert part(source, side="top") == ["part.side must be left or right, not 'top' (str)"]


@pytest.mark.parametrize("package", ["clipzoo", "elsewhere"])
def test_optional_and_further_keywords_are_checked(part, package):
    header = "def __init__(self, width: Optional[int] = None, **options: float): ..."
    source = f"from typing import Optional\nclass Part:\n    {header}"
    name = package if package == "clipzoo" else "optional_part"
    assert part(source, name, width=None, rate=0.5) == part(source, name, width=3) == []
    assert part(source, name, width="wide", rate="fast") == [
        "part.width must be a whole number or null, not 'wide' (str)",
        "part.rate must be a finite number, not 'fast' (str)",
    ]  # fmt: skip


@pytest.mark.parametrize("package", ["clipzoo", "uncheckable_part"])
def test_an_uncheckable_annotation_is_a_fault_that_names_class_argument_and_annotation(part, package):
    source = "class Part:\n    def __init__(self, sizes: list[set[int]]): ..."
    expected = "the annotation list[set[int]] of Part's argument sizes cannot be checked (set[int] in it): change it"
    assert part(source, package, sizes=[[1]]) == [f"part.sizes: {expected}"]


@pytest.mark.parametrize("scale", [14.3, 49.0, 98.0, 103.0])
def test_a_computed_scale_may_equal_its_bound_but_not_exceed_it(scale):
    assert 1 / (1 / scale) > scale or 1 / (1 / scale) < scale, "rounding changes it"
    wpse = "clipzoo.heads.wpse.WpseHead", {"min_scale": scale}
    for target, bounds in (("clipzoo.objectives.cyclip.CyCLIP", {}), (HEAD["_target_"], {}), wpse):
        relations = class_constant(target, "relations")
        values = {"learnable_temperature": True, "temperature": 1 / scale, "max_scale": scale, **bounds}
        assert not list(broken(relations, values))
        assert list(broken(relations, {**values, "max_scale": 0.999 * scale}))
        assert not bounds or list(broken(relations, {**values, "min_scale": 1.001 * scale}))
