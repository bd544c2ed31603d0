"""A plan in the terminal: grouping, units, any width."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import PREDICTED, make_plan, plans
from rich.console import Console

from jaxpar.plan import (
    Plan,
    diff,
)
from jaxpar.report.group import groups
from jaxpar.report.table import print_diff, print_plan, print_table
from jaxpar.report.units import bytes_text, count_text, seconds_text, spec_text


def printed(
    show: Callable[..., None], *args: Any, width: int = 140, **more: Any
) -> str:
    """What a function prints on a console of some width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    show(*args, console=console, **more)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


def cells(text: str, first: str) -> list[str]:
    """The words of the line that starts with some text."""
    return next(line for line in text.splitlines() if line.startswith(first)).split()


@settings(max_examples=10, deadline=None)
@given(plans(), st.booleans())
def test_any_plan_prints(plan: Plan, verbose: bool):
    print_plan(plan, Console(file=io.StringIO(), width=100), verbose=verbose)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [40, 80, 140])
def test_plan_prints_at_any_width(width: int, verbose: bool):
    text = printed(print_plan, make_plan(), width=width, verbose=verbose)
    for section in ("step", "memory per", "parameters", "activations", "collectives"):
        assert section in text
    assert ("needs 4" in text) is verbose


def test_plan_table():
    text = printed(print_plan, make_plan(layers=32))
    assert "cpu-8: 8 x CPU, 1.95 KiB each" in text
    assert "data=2 tensor=4" in text and "data: batch; memory" in text
    assert "step 500 ms, 40.0% MFU, 1.61 KiB per device" in text
    assert "tokens int32 4x7: data, ·" in text
    assert cells(text, "compute ")[:3] == ["compute", "400", "ms"]
    assert cells(text, "communication data+tensor")[1:4] == [
        "data+tensor",
        "20.0",
        "ms",
    ]
    assert cells(text, "blocks/*/up")[1:7] == [
        "32",
        "8x16",
        "data,",
        "tensor",
        "·,",
        "tensor",
    ]
    assert cells(text, "blocks/*/res")[1:3] == ["32", "4x8x16"]
    assert cells(text, "embed/embedding")[1:4] == ["1", "8x16", "whole"]
    assert cells(text, "all-gather over data")[3:8] == ["64", "64", "B", "4.00", "KiB"]
    assert "note logical name 'emebd' is used by no rule" in text
    assert "elimination: optimal, 500 ms (lower bound 400 ms, gap 20.0%)" in text


def test_diff_table():
    after = make_plan(
        predicted=replace(PREDICTED, step_s=0.75), params={}, collectives=()
    )
    text = printed(print_diff, diff(make_plan(), after))
    assert cells(text, "predicted.step_s")[2:6] == ["500", "ms", "750", "ms"]
    assert "+50.0%" in text
    assert cells(text, 'params."blocks/*/up/kernel"')[1:] == ["3", "present", "-"]
    assert cells(text, 'collectives."all-gather')[3:] == ["1", "384", "B", "-"]
    assert printed(print_diff, diff(after, after)) == "The plans do the same.\n"


def test_layers_that_differ_are_told_apart():
    params = dict(make_plan(layers=8).params)
    for i in (2, 3, 7):
        path = f"blocks/{i}/up/kernel"
        params[path] = replace(params[path], compute=((), ()))
    text = printed(print_plan, make_plan(params=params))
    assert cells(text, "blocks/2-3,7/up/kernel")[1] == "3"
    assert cells(text, "blocks/0-1,4-6/up/kernel")[1] == "5"


def test_groups_keep_what_does_not_vary():
    names = ["a/0/b_1/w8", "a/1/b_1/w8", "x", "a/0/b_2", "10"]
    labels = [(g.label, len(g.names)) for g in groups(names, lambda _: 0)]
    assert labels == [("a/*/b_1/w8", 2), ("x", 1), ("a/0/b_2", 1), ("10", 1)]


def test_summary_says_what_it_leaves_out():
    params = {
        f"layer{'abcdefghijklmnopqrstuvwxyz'[i]}": param
        for i, param in enumerate(list(make_plan(26).params.values())[:26])
    }
    text = printed(print_plan, make_plan(params=params))
    assert "and 2 more rows" in text
    assert "more rows" not in printed(
        print_plan, make_plan(params=params), verbose=True
    )


def test_names_are_no_markup():
    plan = make_plan(notes=("[red]x[/red] :boom:",))
    assert "note [red]x[/red] :boom:" in printed(print_plan, plan)
    text = printed(print_table, "[bold]", ("a", "count"), [("[/x] :boom:", "1")])
    assert "[bold]" in text and "[/x] :boom:" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1.5 * 2**30), "1.50 GiB"),
        (bytes_text(12.3 * 2**20), "12.3 MiB"),
        (seconds_text(0), "0 s"),
        (seconds_text(3e-9), "3 ns"),
        (seconds_text(1.234e-5), "12.3 µs"),
        (seconds_text(0.4123), "412 ms"),
        (seconds_text(83), "1 min 23 s"),
        (count_text(8.03e9), "8.03 B"),
        (count_text(12), "12"),
        (spec_text(((), ("a", "b"), ("c",))), "·, a+b, c"),
        (spec_text(((), ())), "whole"),
        (spec_text(()), "whole"),
    ],
)
def test_units(text: str, expected: str):
    assert text == expected
