"""The constructors' annotations as the schema of the configuration."""

from __future__ import annotations

import ast

import pytest

from clipzoo.config import schema

HEAD = {
    "_target_": "clipzoo.heads.clip.ClipHead", "image_width": 8, "text_width": 8, "embed_width": 4,
    "temperature": 0.07, "max_scale": 100.0, "learnable_temperature": True,
}  # fmt: skip


def faults(**changes) -> list[str]:
    return list(schema.faults({"head": {**HEAD, **changes}}))


def test_a_right_configuration_has_no_faults():
    assert faults() == []


def test_an_unknown_argument_is_named_with_the_nearest():
    assert faults(temprature=1.0) == ["head.temprature: ClipHead has no such argument; did you mean temperature?"]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("embed_width", 4.5, "head.embed_width must be a whole number of at least 1, not 4.5 (float)"),
        ("temperature", "hot", "head.temperature must be a number above 0, not 'hot' (str)"),
        ("temperature", 0, "head.temperature must be a number above 0, not 0 (int)"),
        ("image_width", "wide", "head.image_width must be int, not 'wide' (str)"),
        ("learnable_temperature", 1, "head.learnable_temperature must be bool, not 1 (int)"),
        ("embed_width", True, "head.embed_width must be a whole number of at least 1, not True (bool)"),
    ],
)
def test_a_wrong_type_is_named_with_the_value_seen(key, value, expected):
    assert faults(**{key: value}) == [expected]


def test_a_missing_argument_is_named():
    short = {key: value for key, value in HEAD.items() if key != "max_scale"}
    assert list(schema.faults({"head": short})) == ["head.max_scale is missing: ClipHead needs it"]


def test_a_missing_class_is_named_with_the_nearest():
    found = faults(_target_="clipzoo.heads.clip.ClipHed")
    assert found == [
        "head._target_=clipzoo.heads.clip.ClipHed: clipzoo.heads.clip defines no ClipHed; did you mean ClipHead?"
    ]


@pytest.mark.parametrize(
    ("annotation", "fitting", "unfitting"),
    [
        ("int | None", [1, None], ["1", 1.0]),
        ("float", [1, 1.5, float("inf")], ["1", None, True]),
        ("Positive", [1, 0.5], [0, -1.0, "1", True]),
        ("Count | None", [1, None], [0, -1, 0.5]),
        ("Literal['a', 'b']", ["a"], ["c", 1]),
        ("list[float]", [[1, 2.0], []], [1.0, ["a"]]),
        ("list[int] | None", [None, [1]], [[1.5]]),
        ("dict[str, Any]", [{}, {"a": 1}], [[], None]),
        ("tuple[float, float]", [[1, 2]], [[1], [1, 2, 3]]),
        ("Kernel", [{"_target_": "x.Y"}], [{"width": 1}, 1, None]),
        ("str | list[str | dict[str, Any]]", ["a", ["a", {"path": "b"}]], [1, [1]]),
    ],
)
def test_yaml_values_fit_annotations(annotation, fitting, unfitting):
    node = ast.parse(annotation, mode="eval").body
    assert all(schema._fits(value, node) for value in fitting)
    assert not any(schema._fits(value, node) for value in unfitting)


def test_classes_of_other_packages_are_checked_by_importing_them():
    assert list(schema.faults({"part": {"_target_": "fractions.Fraction", "numerator": 1, "denominater": 2}})) == [
        "part.denominater: Fraction has no such argument; did you mean denominator?"
    ]
