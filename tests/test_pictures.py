"""The pictures are drawn from what the package computes, and show it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from docs.generate import figures
from docs.generate.pictures import FOLDER, PICTURES, choice, packet, timeline, workspace
from docs.generate.pictures.svg import COLORS, WIDTH, Drawing
from tokenyard import ExpertWeights, LayerSpec, MoELayer, Routes, launch, plan
from tokenyard.exchange import EXCHANGES, SharedMemoryTransport
from tokenyard.formats import FORMATS, WEIGHT_FORMATS
from tokenyard.group import thread_groups

# Pictures that `tokenyard bench show` draws.
DRAWN_FIGURES = sorted(
    path
    for path in FOLDER.glob("*.png")
    if path.stem in ("dispatch-cpu", "combine-error-cpu") or path.stem.endswith("-h200")
)


def texts(name: str) -> list[str]:
    """The lines of text in a picture, as its file has them."""
    root = ElementTree.parse(FOLDER / f"{name}.svg").getroot()
    return [str(element.text) for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_package_computes(name):
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name](), "run: make docs"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_colors_for_both_modes_and_needs_nothing_from_elsewhere(name):
    source = (FOLDER / f"{name}.svg").read_text()
    light, dark = re.search(
        r"<style>(.*)@media\(prefers-color-scheme:dark\)\{(.*)\}</style>", source
    ).groups()
    for color, (in_light, in_dark) in COLORS.items():
        assert f".{color}{{fill:{in_light}}}" in light
        assert f".{color}{{fill:{in_dark}}}" in dark
    assert f'class="page" width="{WIDTH}"' in source  # a background of its own
    assert "href" not in source
    assert "url(" not in source.replace("url(#head)", "")


@pytest.mark.parametrize("picture", DRAWN_FIGURES, ids=lambda path: path.stem)
def test_a_picture_of_figures_shows_the_run_whose_figures_are_told(picture):
    measured = figures.measured(picture.stem)
    told = f"{measured.title}\n{measured.provenance['date'][:10]}"
    assert Image.open(picture).text["Description"] == told, (
        f"run: tokenyard bench show bench/results/{picture.stem}.json --plot docs/pictures/{picture.name}"
    )


def test_the_bytes_of_the_packet_are_those_of_a_row():
    shown = [int(text, 16) for text in texts("packet") if re.fullmatch("[0-9a-f]{2}", text)]
    layout, values = packet.packet()
    assert shown[: len(values)] == values
    found = layout.unpack(torch.tensor([values], dtype=torch.uint8))
    row = packet.exchange_spec_of(packet.SMALL).wire.encode(
        (torch.arange(40) - 20).reshape(1, -1).bfloat16() / 8
    )
    assert torch.equal(found["data"].view(torch.uint8), row.payloads["data"].view(torch.uint8))
    assert (found["ids"].tolist(), found["weights"].tolist()) == ([[1, -1]], [[0.75, 0.0]])


def test_the_workspace_is_the_one_that_the_exchange_would_make():
    exchange_specs = [wiring.exchange_spec for wiring in workspace.planned().wirings]
    exchange = SharedMemoryTransport(thread_groups(workspace.WORLD)[0])
    assert workspace.layout() == exchange.layout_for(exchange_specs)
    assert any(
        f"dispatch at byte {workspace.layout().dispatch_region(0).offset:,}" in text
        for text in texts("workspace")
    )


def test_the_rows_of_the_timeline_are_those_that_a_layer_sends():
    spec = LayerSpec(name="moe", hidden_size=8, intermediate_size=4, num_experts=6, top_k=2)
    weights = ExpertWeights(w13=torch.zeros(6, 8, 8).bfloat16(), w2=torch.zeros(6, 8, 4).bfloat16())

    def rank_main(group):
        agreed = plan([spec], group, max_tokens=4)
        layer = MoELayer(agreed, "moe", weights.select(agreed.local_experts("moe")))
        routes = Routes(topk_ids_TK=timeline.ROUTES[group.rank], topk_weights_TK=torch.ones(3, 2))
        layer(torch.zeros(3, 8).bfloat16(), routes)
        return agreed.stats()["moe"].rows_sent

    sent = launch(timeline.WORLD, rank_main)
    assert timeline.rows() == sent
    for counts in sent:
        assert f"sends {sum(counts)} rows" in texts("timeline")


def test_the_choice_knows_every_exchange_and_no_format_that_is_not_there():
    exchange, wire, weights = choice.CHOICES
    assert _names(exchange) == set(EXCHANGES)
    assert _names(wire) <= set(FORMATS)
    assert _names(weights) <= set(WEIGHT_FORMATS)


def _names(one: choice.Choice) -> set[str]:
    lines = [line for question in one.questions for line in question.answer] + list(one.otherwise)
    return set(re.findall(r"\b(?=\w*[_\d])\w+|allgather|hierarchical", " ".join(lines)))


def test_text_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"takes about \d+ units"):
        Drawing(100, "").text(10, 10, "x" * 110)
    with pytest.raises(ValueError, match="has 44"):
        Drawing(100, "").boxed(10, 10, 50, 20, ["too long for its box"])
    with pytest.raises(ValueError, match="do not fit into a height"):
        Drawing(100, "").boxed(10, 10, 50, 20, ["a", "b"])
