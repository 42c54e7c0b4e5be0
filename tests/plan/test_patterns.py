"""Names of equal layers as one: what is left out stands for all, and no two patterns look alike."""

import random

import pytest

from autopar.plan.patterns import patterns, starred


def of(**groups: str) -> dict[str, list[str]]:
    return {key: [*told] for key, told in patterns({key: names.split() for key, names in groups.items()}).items()}


def test_a_star_is_all_of_them_and_some_are_numbered() -> None:
    assert of(a="h.0.w h.1.w h.2.w") == {"a": ["h.*.w"]}
    assert of(a="h.0.w h.1.w h.3.w", b="h.2.w") == {"a": ["h.[0-1,3].w"], "b": ["h.2.w"]}
    assert of(a="layers.0.weight", b="layers.2.weight layers.2.bias") == {
        "a": ["layers.0.weight"], "b": ["layers.2.weight", "layers.2.bias"],
    }  # fmt: skip
    assert of(a="wte.weight") == {"a": ["wte.weight"]}


def test_of_two_numbers_the_one_that_differs_is_kept() -> None:
    up, down = (" ".join(f"l.{i}.{j}.w" for i in range(3)) for j in (0, 2))
    assert of(up=up, down=down) == {"up": ["l.*.0.w"], "down": ["l.*.2.w"]}


def test_what_is_no_grid_is_spelled_out() -> None:
    assert of(a="l.0.1.w l.1.0.w", b="l.0.0.w l.1.1.w") == {"a": ["l.0.1.w, l.1.0.w"], "b": ["l.0.0.w, l.1.1.w"]}


@pytest.mark.parametrize("seed", range(20))
def test_no_two_groups_of_one_kind_look_alike(seed: int) -> None:
    drawn = random.Random(seed)
    groups: dict[str, list[str]] = {}
    for i in range(4):
        for j in range(3):
            groups.setdefault(drawn.choice("abc"), []).append(f"l.{i}.m.{j}.w")
    found = patterns(groups)
    told = [pattern for one in found.values() for pattern in one]
    assert len({*told}) == len(told)
    assert {key: [name for names in one.values() for name in names] for key, one in found.items()} == groups
    assert {starred(name)[0] for names in groups.values() for name in names} == {"l.*.m.*.w"}
