"""Position ids after a reduction: kept, or numbered anew (GAP)."""

import pytest
import tiny
import torch
from probes import Every2

import tokred
from tokred.layout import MediaItem, Span
from tokred.positions import renumber
from tokred.reduction import Reduction

RENUMBER = Every2(positions="renumber")


def _renumbered(ids, kept, start, stop):
    reduction = Reduction(kept)
    item = MediaItem("image", stop - start)
    before = [Span(0, start, stop, item)]
    after = [Span(0, *reduction.interval(0, start, stop), item)]
    return renumber(ids, before, after, reduction)


def test_gaps_are_closed_by_hand():
    kept = torch.tensor([[True, True, True, False, False, True, True, False, True, True]])
    ids, shift = _renumbered(torch.arange(10)[None] + 4, kept, 2, 8)
    assert ids.tolist() == [[4, 5, 6, 7, 8, 9, 10]]
    assert shift.tolist() == [3]


def test_grid_loses_its_empty_columns_by_hand():
    """A grid of two rows and three columns at position 2, of which (0, 0), (0, 2) and (1, 2) survive."""
    ids = torch.tensor(
        [[[0, 1, 2, 2, 2, 2, 2, 2, 5, 6]], [[0, 1, 2, 2, 2, 3, 3, 3, 5, 6]], [[0, 1, 2, 3, 4, 2, 3, 4, 5, 6]]]
    )
    kept = torch.tensor([[True, True, True, False, True, False, False, True, True, True]])
    new, shift = _renumbered(ids, kept, 2, 8)
    assert new[:, 0].tolist() == [[0, 1, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 4, 5], [0, 1, 2, 3, 3, 4, 5]]
    assert shift.tolist() == [1]


def _short_embeds(model, batch, row):
    """Return the embeddings of a row without padding and without every second token of its images."""
    embeds = tiny.base_inputs(model, batch)["inputs_embeds"][row]
    ids, valid = batch["input_ids"][row], batch["attention_mask"][row].bool()
    keep, inside = [], 0
    for place, token in enumerate(ids.tolist()):
        inside = inside + 1 if token == tiny.IMAGE else 0
        # An image of 16 tokens ends where the next one may begin.
        if valid[place] and (inside == 0 or inside % 2 == 1):
            keep.append(place)
    return embeds[keep][None]


@pytest.mark.parametrize("site", ["features", "embeds"])
@pytest.mark.parametrize("beams", [1, 2])
def test_renumbered_equals_a_natively_short_prompt(site, beams):
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    expected = []
    for row in range(2):
        embeds = _short_embeds(model, batch, row)
        mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        expected.append(model.generate(inputs_embeds=embeds, attention_mask=mask, **options)[0])
    with tokred.apply(model, Every2(site=site, positions="renumber")):
        output = model.generate(**batch, **options)
    answers = output[:, batch["input_ids"].shape[1] :]
    assert answers.tolist() == [tokens.tolist() for tokens in expected]
    with tokred.apply(model, Every2(site=site)):
        kept = model.generate(**batch, **options)
    assert kept.tolist() != output.tolist()


def test_policy_changes_positions_and_neither_order_nor_choice():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    traces, logits = [], []
    for policy in ("keep", "renumber"):
        with tokred.apply(model, "divprune", keep=0.5, positions=policy) as handle:
            logits.append(model(**batch).logits)
            traces.append([(token.position, token.row, token.column) for token in handle.trace()[0]])
    assert traces[0] == traces[1]
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)


def test_inside_the_decoder_positions_change_from_the_step_on():
    """The oracle runs the stock layers: the first two on everything, the others on survivors with new positions."""
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    stock = tiny.base_inputs(model, batch)
    decoder = model.model.language_model
    hidden = stock["inputs_embeds"]
    length = hidden.shape[1]
    is_image = batch["input_ids"][0] == tiny.IMAGE
    keep = (~is_image | (is_image.cumsum(0) % 2 == 1)).nonzero()[:, 0]

    def run(hidden, layers):
        rotary = decoder.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        mask = torch.full((hidden.shape[1],) * 2, torch.finfo(hidden.dtype).min).triu(1)[None, None]
        for layer in layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        return hidden

    hidden = run(hidden, decoder.layers[:2])[:, keep]
    expected = model.lm_head(decoder.norm(run(hidden, decoder.layers[2:])))
    with tokred.apply(model, Every2(site=2, positions="renumber")):
        logits = model(**batch).logits
    assert logits.shape[1] == length
    torch.testing.assert_close(logits[:, keep], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("site", ["features", 2])
@pytest.mark.parametrize("family", sorted(tiny.BUILDERS))
def test_renumbered_answers_do_not_depend_on_the_cache(family, site):
    """Tokens fed one by one, then two at once, get the logits of one call without a cache."""
    model = tiny.BUILDERS[family]()
    row = tiny.ONE_IMAGE
    first = tiny.inputs(family, [row], mask=False)
    length = first["input_ids"].shape[1]
    later = torch.tensor([[14, 15, 16, 17]])
    ids = torch.cat([first["input_ids"], later], dim=1)
    whole = first | {"input_ids": ids}
    if "mm_token_type_ids" in first:
        whole["mm_token_type_ids"] = (ids == tiny.IMAGE).int()
    with tokred.apply(model, Every2(site=site, positions="renumber")):
        expected = model(**whole, use_cache=False).logits
        output = model(**first, use_cache=True)
        torch.testing.assert_close(output.logits, expected[:, :length], atol=1e-5, rtol=0)
        for start, stop in ((0, 1), (1, 2), (2, 4)):
            cache = {tiny.CACHE_NAME: tiny.cache_of(output)}
            output = model(input_ids=later[:, start:stop], use_cache=True, **cache)
            torch.testing.assert_close(output.logits, expected[:, length + start : length + stop], atol=1e-5, rtol=0)


@pytest.mark.parametrize("site", ["features", 2])
def test_a_renumbered_image_in_the_second_turn(site):
    model = tiny.llava()
    first, second = (tiny.inputs("llava", [tiny.ONE_IMAGE], seed=seed, mask=False) for seed in (0, 1))
    both = {name: torch.cat([first[name], second[name]], dim=int(name == "input_ids")) for name in first}
    with tokred.apply(model, Every2(site=site, positions="renumber")):
        expected = model(**both, use_cache=False).logits
        cache = {tiny.CACHE_NAME: tiny.cache_of(model(**first, use_cache=True))}
        logits = model(**second, use_cache=True, **cache).logits
    torch.testing.assert_close(logits, expected[:, first["input_ids"].shape[1] :], atol=1e-5, rtol=0)


def test_mrope_positions_by_hand():
    """A grid of two rows and four columns keeps columns 0 and 2: a grid of two by two, and text two steps earlier."""
    model = tiny.qwen2_5_vl()
    row = tiny.Row((5, tiny.START, tiny.IMAGE, tiny.END, 7, 8), ((2, 4),))
    batch = tiny.inputs("qwen2_5_vl", [row])
    embeds = tiny.base_inputs(model, batch)["inputs_embeds"]
    keep = [0, 1, 2, 4, 6, 8, 10, 11, 12]
    ids = torch.tensor(
        [[0, 1, 2, 2, 2, 2, 4, 5, 6], [0, 1, 2, 2, 3, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4, 5, 6]]
    ).unsqueeze(1)
    hidden = model.model.language_model(inputs_embeds=embeds[:, keep], position_ids=ids).last_hidden_state
    with tokred.apply(model, RENUMBER):
        logits = model(**batch).logits
    torch.testing.assert_close(logits[:, keep], model.lm_head(hidden), atol=1e-5, rtol=0)


def test_bad_policy():
    with pytest.raises(tokred.errors.ParameterError, match="positions='move' is not one of"):
        tokred.DivPrune(positions="move")
