"""The page of planning: its tables name the files that the code reads."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pages import PAGES

from cgplan.optimizer.decisions import MODES
from cgplan.traffic.files import FORMS, REQUESTS, SHAREGPT, VLLM_LOG, Form, RequestForm
from cgplan.traffic.step_times import MEASURED, TIMELESS, StepForm

TEXT = PAGES["planning"].read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
COLUMNS = [{*re.findall(r"`(\w[\w ]*)`", row[1])} for row in ROWS if len(row) == 2]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_each_form_of_traffic_has_a_row_with_its_columns(form: Form) -> None:
    assert [names for names in COLUMNS if {*form.required} <= names <= {*form.columns}]


@pytest.mark.parametrize("form", REQUESTS, ids=lambda form: form.name)
def test_the_row_of_a_trace_tells_its_unit_and_the_tokens_of_a_block(
    form: RequestForm[Any],
) -> None:
    two = [row for row in ROWS if len(row) == 2]
    known = [
        text
        for (_, text), names in zip(two, COLUMNS, strict=True)
        if {*form.required} <= names <= {*form.columns}
    ]
    assert ["(ms)" in text for text in known] == [form.microseconds == 1e3]
    assert re.findall(r"blocks of (\d+) tokens", known[0]) in ([], [str(form.block)])


def test_the_tables_of_a_log_and_the_key_of_conversations_are_named() -> None:
    assert {", ".join(VLLM_LOG.required[:5]), *SHAREGPT.required} <= {
        *re.findall("`([^`]*)`", TEXT)
    }


@pytest.mark.parametrize("form", MEASURED, ids=lambda form: form.name)
def test_each_program_that_measures_steps_has_a_row(form: StepForm) -> None:
    program = form.name.split()[-1]
    assert [row for row in ROWS if len(row) == 3 and program in row[0]]


def test_the_page_names_the_modes_that_a_plan_weighs() -> None:
    assert [mode for mode in MODES if str(mode) not in TEXT] == []


def test_the_page_names_results_without_the_batch_of_a_step() -> None:
    assert [name for name in TIMELESS.values() if name.split()[-1] not in TEXT] == []
