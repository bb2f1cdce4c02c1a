"""The support tables say what the planner does, and are written only where a page asks for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from docs.generate import tables
from tokenyard import LayerSpec, draft
from tokenyard.errors import InputError, PlanError
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import ACTIVATIONS, EXPERTS
from tokenyard.formats import FORMATS
from tokenyard.routing import SoftmaxRouter
from tokenyard.support import NO, YES, support_tables

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = tables.marks("support")
SPEC = {"name": "moe", "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2}


def table(title: str) -> dict[str, dict[str, str]]:
    """The rows of a table, by their first cell."""
    found = next(t for t in support_tables() if t.title == title)
    return {row[0].replace("`", ""): dict(zip(found.columns, row, strict=True)) for row in found.rows}


def plans(exchange: str = "two_sided", **changes) -> bool:
    try:
        draft([LayerSpec(**{**SPEC, **changes})], 2, exchange=exchange, max_tokens=4)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("way", "field"), [("out", "wire"), ("back", "combine_wire")])
def test_exchange_cells_are_what_plans_do(exchange, name, way, field):
    cell = table("Exchanges and formats")[name][f"`{exchange}`"]
    for dtype, weights in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        says = cell in (YES, way) or str(dtype).removeprefix("torch.") in cell
        assert plans(exchange, **{field: name}, dtype=dtype, weights=weights) == says
    assert cell in (YES, NO, "float32 only", "out", "back")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanges_return_single_choices_where_plans_do(exchange):
    cells = table("Exchanges and formats")["results of single choices"]
    assert (cells[f"`{exchange}`"] == "back") == plans(exchange, sum="choices")


@pytest.mark.parametrize("experts", EXPERTS)
def test_expert_cells_are_what_plans_do(experts, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cells = {name: row[f"`{experts}`"] for name, row in table("Experts").items()}
    also = {"experts": experts, "router": SoftmaxRouter(2, renormalize=True)}
    for act in ACTIVATIONS:
        assert (cells[f"activation {act}"] == YES) == plans("allgather", activation=act, **also)
    for name in [key.removeprefix("weights in ") for key in cells if key.startswith("weights in ")]:
        weights, _, inner = name.removesuffix(" between the products").partition(", ")
        wanted = {"weights": weights, "inner": inner or "exact"}
        assert (cells[f"weights in {name}"] == YES) == plans("allgather", **wanted, **also)
    assert (cells["route by themselves"] == YES) == (not plans("two_sided", **also))
    invariant = [cells[f"the same bits in any batch, on a {device}"] == YES for device in ("CPU", "GPU")]
    assert any(invariant) == plans("allgather", sum="choices", **also)
    for device, row in (("cpu", "run on a CPU"), ("cuda", "run on an NVIDIA GPU")):
        assert (cells[row] == YES) == (EXPERTS[experts].runs_on(torch.device(device)) is None)


def test_every_registry_is_in_the_tables():
    text = tables.TABLES["support"]()
    for name in [*EXCHANGES, *FORMATS, *EXPERTS, *ACTIVATIONS, "contiguous", "grouped_sigmoid", "gpt_oss"]:
        assert f"`{name}`" in text


def test_tables_are_plain_values():
    text = json.dumps([t.as_dict() for t in support_tables()])
    assert "`" not in text
    assert "*" not in text
    first, *_, experts, _routers, _placements, _models = json.loads(text)
    assert first["rows"][0]["format"] == "bf16"
    assert first["rows"][0]["one_sided"] == "✓"
    assert experts["rows"][0]["what"] == "activation swiglu"


_ELSEWHERE = """
import json, os, platform, sys
for library in ("triton", "transformers", "torchao", "compressed_tensors", "matplotlib", "flashinfer", "vllm"):
    sys.modules[library] = None  # importing it fails, and it is not to be found
platform.machine = lambda: "aarch64"
os.environ |= {"TOKENYARD_EXCHANGE": "one_sided", "TOKENYARD_PARANOID": "1", "TRITON_INTERPRET": "0"}
from docs.generate.tables import TABLES
print(json.dumps({name: make() for name, make in TABLES.items()}))
"""


def test_tables_are_the_same_on_every_machine():
    """Without the libraries that are not required, on another CPU, and whatever the environment says."""
    command = [sys.executable, "-c", _ELSEWHERE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: make() for name, make in tables.TABLES.items()}


def test_rewrite_touches_only_what_is_between_the_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{BEGIN}\nold\n{END}\nafter\n")
    assert tables.rewrite(page)
    written = tables.TABLES["support"]()
    assert page.read_text() == f"# Before\n{BEGIN}\n\n{written}\n\n{END}\nafter\n"
    assert not tables.rewrite(page)


def test_a_page_gets_every_kind_of_tables_that_it_asks_for(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("\n".join(mark for name in tables.TABLES for mark in tables.marks(name)))
    assert tables.rewrite(page)
    for make in tables.TABLES.values():
        assert make() in page.read_text()
    assert not tables.rewrite(page)


@pytest.mark.parametrize("text", [BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_rewrite_refuses_a_page_without_its_marks(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(InputError, match="support:begin"):
        tables.rewrite(page)
    assert page.read_text() == text
