"""Properties of single methods that no golden file pins."""

import math
from functools import partial

import pytest
import tiny
import torch

import tokred
from tokred import Context, Need, Observation, Stage
from tokred.adapters import grid_cells
from tokred.errors import UndeclaredObservationError
from tokred.layout import MediaItem, Span
from tokred.report import CallReport
from tokred.vision.corematching import affinity, core_tokens, elbow
from tokred.vision.sparsevlm import merge_clusters, raters_of, recycle, relevance
from tokred.vision.visionzip import zip_tokens


def _noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Every method, and settings that count in another way.
SETTINGS = dict(sorted(tokred.methods().items())) | {"sparsevlm recycling": partial(tokred.SparseVLM, recycle=True)}


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("length", [1, 2, 5, 16, 37])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_method_keeps_its_budget(setting, length, keep):
    built = SETTINGS[setting](keep=keep)
    wanted = min(length, max(1, round(keep * length)))
    if wanted == length:
        assert built.count(length) == length
        return
    groups, text, left = 2, 3, length
    steps = built.plan(tokred.ModelShape(num_layers=4, tower_layers=3, rowwise_projector=True))
    inside = all(step.stage is Stage.ENCODER_BLOCK for step in steps)
    # How many blocks a tower has is not known before; each can merge half of the tokens.
    assert built.count(length) == (None if inside else wanted)
    count = max(wanted, -(-length // 2 ** len(steps))) if inside else wanted
    for step in steps:
        context = _context(step, groups, left, text, total=length)
        if (step.count or (lambda total, left: built.count(left)))(length, left) == left:
            continue
        selection = step.select(context)
        assert inside or (selection.keep.diff(dim=1) > 0).all()
        assert selection.keep.min() >= 0
        assert selection.keep.max() < left
        left = selection.keep.shape[1]
        assert left >= count
        if selection.rows is not None:
            assert selection.rows.shape == (groups, left, 8)
    assert left == count


def _context(step, groups, length, text, total):
    made = {
        Need.CLS_ROW: _noise(groups, 2, length + 1).softmax(-1),
        Need.CLS_JOINT_ROW: _noise(groups, 1, length + 1).softmax(-1),
        Need.TOWER_KEYS: _noise(groups, length + (step.stage is not Stage.ENCODER_BLOCK), 8),
        Need.TOWER_HEAD_KEYS: _noise(groups, length + 1, 16),
        Need.CLS_HIDDEN: _noise(groups, 1, 8),
        Need.LAST_ROW: _noise(groups, 2, length).softmax(-1),
        Need.NEXT_ROW: _noise(groups, 2, length).softmax(-1),
        Need.TEXT_ROWS: _noise(groups, 2, text, length + text).softmax(-1),
        Need.LAYER_KEYS: _noise(groups, length + text, 8),
        Need.NORMED_HIDDEN: _noise(groups, length + text, 8, seed=1),
        Need.EMBEDDINGS: _noise(groups, length + text, 8, seed=2),
        Need.ACTIVE_NEURONS: _noise(groups, length + text, 16) > 0,
        Need.COLUMN_SUM: _noise(groups, length).softmax(-1),
        Need.GRID: grid_cells(1, 1, length).expand(groups, -1, -1),
    }

    def provide(observation, of_text):
        whole = made[observation.need]
        if observation.need in (Need.LAYER_KEYS, Need.NORMED_HIDDEN, Need.EMBEDDINGS, Need.ACTIVE_NEURONS):
            return whole[:, length:] if of_text else whole[:, :length]
        if observation.need is Need.TEXT_ROWS:
            return whole[..., length:] if of_text else whole[..., :length]
        return whole

    places = torch.arange(length + text).expand(groups, -1)
    hidden = _noise(groups, length, 8)
    sizes = torch.ones(groups, length)
    return Context(hidden, step.needs, provide, places[:, :length], places[:, length:], total, sizes=sizes)


def test_undeclared_observations_are_refused():
    context = Context(_noise(1, 2, 3), frozenset({Need.LAST_ROW}), lambda seen, text: seen, torch.arange(2)[None])
    assert context.observe(Need.LAST_ROW) == Observation(Need.LAST_ROW)
    with pytest.raises(UndeclaredObservationError, match="cls_row"):
        context.observe(Need.CLS_ROW)
    with pytest.raises(UndeclaredObservationError, match="text"):
        context.observe_text(Need.LAST_ROW)
    with pytest.raises(UndeclaredObservationError, match="text"):
        _ = context.text_positions


def test_uniform_spreads_evenly():
    model = tiny.llava()
    with tokred.apply(model, "uniform", num_tokens=4) as handle:
        model(**tiny.inputs("llava", [tiny.ONE_IMAGE]))
        columns = [(token.row, token.column) for token in handle.trace()[0]]
    assert columns == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_random_depends_on_its_seed():
    model = tiny.llava()
    kept = []
    for seed in (0, 0, 1):
        with tokred.apply(model, "random", num_tokens=5, seed=seed) as handle:
            model(**tiny.inputs("llava", [tiny.ONE_IMAGE]))
            kept.append([token.position for token in handle.trace()[0]])
    assert kept[0] == kept[1] != kept[2]


def test_divprune_repeats_duplicates_only_as_released():
    features = torch.eye(4)[[0, 0, 1, 2, 3]].unsqueeze(0)
    corrected = tokred.DivPrune(num_tokens=5).picks(features)[0]
    assert sorted(corrected.tolist()) == [0, 1, 2, 3, 4]
    released = tokred.DivPrune(num_tokens=5, reference_exact=True).picks(features)[0]
    assert len(set(released.tolist())) == 4


def test_dart_takes_the_least_similar_tokens():
    """One visual pivot and no text: by hand the tokens that point farthest from it."""
    angles = torch.tensor([0.0, 0.1, 3.0, 0.2, 1.5, 2.0])
    hidden = torch.stack([angles.cos(), angles.sin()], dim=-1).unsqueeze(0)
    keys = torch.tensor([9.0, 1, 1, 1, 1, 1]).view(1, 6, 1)
    places = torch.arange(6).unsqueeze(0)
    method = tokred.DART(num_tokens=3, pivots_image=1, pivots_text=0)
    nothing = hidden[:, :0], keys[:, :0], places[:, :0]
    assert method.survivors((hidden, keys, places), nothing).tolist() == [[0, 2, 5]]


def test_hiprune_keeps_an_anchor_and_what_stands_around_it():
    """The anchor stands in the corner (1, 2) of two rows of three: (0, 2) and (1, 1) are its only neighbours."""
    shallow = torch.tensor([[0.0, 0, 0, 0, 0, 1]])
    deep = torch.tensor([[0.9, 0.8, 0.1, 0.7, 0.2, 0.0]])
    method = tokred.HiPrune(num_tokens=4, alpha=1.0)
    assert method.survivors(shallow, deep, grid_cells(1, 2, 3)[None]).tolist() == [[0, 2, 4, 5]]


@pytest.mark.parametrize(("exact", "expected"), [(False, [0, 3, 4, 6, 8]), (True, [0, 2, 3, 4, 6])])
def test_hiprune_neighbours_cross_rows_only_as_released(exact, expected):
    """The anchor is the first token of the middle row: left of it stands nothing, or the end of the row above."""
    shallow = torch.tensor([[0.0, 0, 0, 1, 0, 0, 0, 0, 0]])
    deep = torch.tensor([[0.0, 0.8, 0, 0, 0, 0.7, 0, 0, 0.9]])
    method = tokred.HiPrune(num_tokens=5, alpha=1.0, reference_exact=exact)
    assert method.survivors(shallow, deep, grid_cells(1, 3, 3)[None]).tolist() == [expected]


def test_hiprune_does_not_look_into_the_next_frame():
    """Two frames of one row of two tokens: the neighbour below is missing, not the same cell of the other frame."""
    shallow = torch.tensor([[0.0, 1, 0, 0]])
    deep = torch.tensor([[0.0, 0, 0.1, 0.9]])
    grid = grid_cells(2, 1, 2)[None]
    assert tokred.HiPrune(num_tokens=3, alpha=1.0).survivors(shallow, deep, grid).tolist() == [[0, 1, 3]]


def test_fastervlm_keeps_what_the_cls_token_looks_at():
    """Head means 0.3, 0.5, 0.1 and 0.4: the second and the fourth patch."""
    rows = torch.tensor([[[9.0, 0.6, 0.1, 0.2, 0.0], [9.0, 0.0, 0.9, 0.0, 0.8]]])
    method = tokred.FasterVLM(num_tokens=2)
    [step] = method.plan(tokred.ModelShape(num_layers=4, tower_layers=3, rowwise_projector=True))
    context = Context(torch.zeros(1, 4, 2), step.needs, lambda seen, text: rows, torch.arange(4)[None])
    assert step.select(context).keep.tolist() == [[1, 3]]


def test_pyramiddrop_halves_three_times():
    model = tiny.llava()
    with tokred.apply(model, "pyramiddrop") as handle:
        model(**tiny.inputs("llava", [tiny.ONE_IMAGE]))
        stages = handle.summary().to_dict()["stages"]
    found = [(stage["layer"], stage["tokens_before"], stage["tokens_after"]) for stage in stages]
    assert found == [(1, [16], [8]), (2, [8], [4]), (3, [4], [2])]


@pytest.mark.parametrize("layers", [(), (0, 1), (2, 1), (1, 1), (1.5,), 3])
def test_pyramiddrop_refuses_layers(layers):
    with pytest.raises(tokred.errors.ParameterError, match="layers="):
        tokred.PyramidDrop(layers=layers)


def test_corematching_counts_neurons_that_both_fire():
    media = torch.tensor([[[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]], [[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0]]]) > 0
    query = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 1]]) > 0
    assert affinity(media, query).tolist() == [[2, 0, 1], [3, 1, 1]]


def test_corematching_keeps_what_is_above_the_elbow():
    """The curve 9 8 3 2 1 lies farthest from the chord 9 7 5 3 1 at 3. In 5 5 5 5 1 that is the last 5, which no token
    exceeds, and a flat curve has no elbow."""
    score = torch.tensor([[2, 9, 1, 8, 3], [5, 1, 5, 5, 5], [4, 4, 4, 4, 4]])
    place, value = elbow(score)
    assert place.tolist() == [2, 3, 0]
    assert value.tolist() == [3, 5, 4]
    assert core_tokens(score).int().tolist() == [[0, 1, 0, 1, 0], [1, 0, 1, 1, 1], [1] * 5]


@pytest.mark.parametrize(
    ("text", "query", "expected"), [(6, 5, [1, 3]), (3, 5, [0, 2]), (6, 1, [0, 1, 2, 3]), (0, 5, [0, 1, 2, 3])]
)
def test_corematching_asks_the_text_token_that_many_from_the_end(text, query, expected):
    """Token 1 of the text fires neurons 1 and 3, token 0 neurons 0 and 2, the others none; visual token i neuron i."""
    media = torch.eye(4, dtype=torch.bool)[None]
    firing = torch.zeros(1, 6, 4, dtype=torch.bool)
    firing[0, 1, [1, 3]] = firing[0, 0, [0, 2]] = True
    method = tokred.CoreMatching(query=query)
    assert method.count(4) is None
    # The curve 1 1 0 0 has its elbow at the second token, whose score is the largest too.
    assert method.survivors(media, firing[:, :text]).tolist() == [expected]
    assert tokred.CoreMatching(query=query, num_tokens=2).survivors(media, firing[:, :text]).tolist() == [expected[:2]]


def test_corematching_gives_items_of_one_length_different_numbers():
    media = torch.zeros(2, 5, 9, dtype=torch.bool)
    for item, score in enumerate([[2, 9, 1, 8, 3], [5, 1, 5, 5, 5]]):
        for token, neurons in enumerate(score):
            media[item, token, :neurons] = True
    text = torch.ones(2, 5, 9, dtype=torch.bool)
    assert tokred.CoreMatching().survivors(media, text).tolist() == [[1, 3, -1, -1], [0, 2, 3, 4]]


@pytest.mark.parametrize("family", sorted(tiny.BUILDERS))
def test_corematching_row_of_padded_batch_equals_single_run(family):
    """Without a budget: every picture has its own elbow."""
    model = tiny.BUILDERS[family]()
    rows = [tiny.ONE_IMAGE, tiny.TWO_IMAGES]
    with tokred.apply(model, "corematching", layer=2) as handle:
        together = model(**tiny.inputs(family, rows)).logits[:, -1]
        counts = handle.summary().stages[0].tokens_after
        for index, row in enumerate(rows):
            alone = model(**tiny.inputs(family, [row])).logits[0, -1]
            stage = handle.summary().stages[0]
            assert stage.tokens_after == [counts[index]]
            assert 0 < counts[index] < stage.tokens_before[0]
            torch.testing.assert_close(together[index], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("corematching", {"layer": 0}), ("corematching", {"query": 0}), ("fastv", {"keep": None})],
)
def test_refused_parameters(method, parameters):
    [name] = parameters
    with pytest.raises(tokred.errors.ParameterError, match=f"{name}="):
        tokred.methods()[method](**parameters)


def test_sparsevlm_raters_look_more_like_the_picture_than_the_mean():
    """One picture token whose likeness to the text is 3 : 1 : 1, and text that looks all the same."""
    media = torch.tensor([[[1.0, 0.0]]])
    share = relevance(media, torch.tensor([[[math.log(3), 0.0], [0.0, 1.0], [0.0, -1.0]]]))
    torch.testing.assert_close(share, torch.tensor([[0.6, 0.2, 0.2]]))
    assert raters_of(share).tolist() == [[True, False, False]]
    assert raters_of(torch.tensor([[0.25] * 4, [0.5, 0.0, 0.5, 0.0]])).tolist() == [[True] * 4, [True, False] * 2]


@pytest.mark.parametrize(("heads", "expected"), [(0.5, [0.4, 0.2, 0.3]), (1.0, [0.25, 0.35, 0.2])])
def test_sparsevlm_listens_to_raters_in_the_strongest_heads(heads, expected):
    """The second text token is no rater. Of two heads the first pays 0.9 to the three tokens, the other 0.7."""
    rows = torch.tensor(
        [[[[0.6, 0.1, 0.2], [0, 0, 1], [0.2, 0.3, 0.4]], [[0.1, 0.6, 0.1], [1, 0, 0], [0.1, 0.4, 0.1]]]]
    )
    score = tokred.SparseVLM(heads=heads).rate(rows, torch.tensor([[True, False, True]]))
    torch.testing.assert_close(score, torch.tensor([expected]))


def test_sparsevlm_without_text_keeps_the_first_tokens():
    score = tokred.SparseVLM().rate(torch.zeros(1, 2, 0, 3), raters_of(torch.zeros(1, 0)))
    assert score.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(("kept", "length", "dropped", "merged"), [(300, 576, 276, 9), (200, 309, 109, 4)])
def test_sparsevlm_budget_and_recycled_tokens(kept, length, dropped, merged):
    """Of 276 dropped tokens 82 + 1 are merged, into 8 + 1; of 109 dropped ones 32 + 1, into 3 + 1."""
    assert kept + dropped == length
    released = tokred.SparseVLM(num_tokens=kept, recycle=True, reference_exact=True)
    assert released.split(1.0, length, length) == (kept, merged)
    assert tokred.SparseVLM(num_tokens=kept, reference_exact=True).split(1.0, length, length) == (kept, 0)
    corrected = tokred.SparseVLM(num_tokens=kept + merged, recycle=True)
    assert corrected.split(1.0, length, length) == (kept, merged)


def test_sparsevlm_drops_a_token_at_least_as_released():
    released = tokred.SparseVLM(num_tokens=40, reference_exact=True)
    assert [released.step_count(1.0, 40, left) for left in (40, 39)] == [39, 38]
    assert released.count(40) is None
    everything = tokred.SparseVLM(keep=1.0, reference_exact=True)
    assert everything.step_count(1.0, 40, 40) == everything.count(40) == 40


def test_sparsevlm_has_the_released_budgets():
    """Three steps of SparseVLM+ for 192 tokens."""
    method = tokred.SparseVLM(num_tokens=118)
    assert [method.step_count(exponent, 576, 576) for exponent in method.exponents(3)] == [300, 200, 118]


def test_clusters_around_density_peaks():
    """Pairs at 101 and 1 are the densest; of each pair the first is a centre, and the others join the nearest."""
    x = torch.tensor([0, 100, 1, 101, 101.2, 1.5, 103]).view(1, 7, 1)
    assigned, merged = merge_clusters(x, 2)
    assert assigned.tolist() == [[1, 0, 1, 0, 0, 1, 0]]
    torch.testing.assert_close(merged[0, :, 0], torch.tensor([405.2 / 4, 2.5 / 3]))


def test_recycled_tokens_stand_where_their_earliest_member_stood():
    """Of 20 dropped tokens the 6 + 1 best are merged: three around 1 and four around 101."""
    hidden = torch.full((1, 21, 1), -50.0)
    score = torch.full((1, 21), 0.1)
    for token, value in {2: 0, 3: 100, 5: 1, 7: 101, 8: 101.2, 9: 1.5, 12: 103, 4: 77}.items():
        hidden[0, token, 0], score[0, token] = value, 0.5
    selection = recycle(hidden, score, torch.tensor([[4]]), 2)
    assert selection.keep.tolist() == [[2, 3, 4]]
    torch.testing.assert_close(selection.rows[0, :, 0], torch.tensor([2.5 / 3, 405.2 / 4, 77]))
    expected = {5: 2, 9: 2, 7: 3, 8: 3, 12: 3}
    assert selection.merged_into.tolist() == [[expected.get(token, -1) for token in range(21)]]


@pytest.mark.parametrize("family", sorted(tiny.BUILDERS))
def test_recycled_tokens_go_on_through_the_stock_layers(family):
    """The oracle feeds layers 2 and later the survivors of layer 1, of which some are means of tokens."""
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE])
    seen = {}
    decoder = model.model.language_model
    hook = decoder.layers[2].register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs, hidden=args[0]), with_kwargs=True
    )
    model(**batch, use_cache=False)
    hook.remove()
    length = batch["input_ids"].shape[1]
    with tokred.apply(model, tokred.SparseVLM(keep=0.5, layers=(2,), recycle=True)) as handle:
        logits = model(**batch).logits
        [tokens] = handle.trace()
    alive = {token.position: token.merged for token in tokens}
    media = (batch["input_ids"][0] == tiny.IMAGE).tolist()
    keep = [place for place in range(length) if place in alive or not media[place]]
    assert len(alive) == round(sum(media) / 2)
    assert any(alive.values())

    hidden = seen["hidden"].clone()
    for position, merged in alive.items():
        assert all(position < other for other in merged)
        hidden[0, position] = seen["hidden"][0, [position, *merged]].mean(0)
    hidden = hidden[:, keep]
    rotary = tuple(part[:, keep] for part in seen["position_embeddings"])
    mask = torch.full((len(keep),) * 2, torch.finfo(hidden.dtype).min).triu(1)[None, None]
    for layer in decoder.layers[2:]:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    torch.testing.assert_close(logits[:, keep], model.lm_head(decoder.norm(hidden)), atol=1e-5, rtol=0)


def test_recycling_row_of_padded_batch_equals_single_run():
    model = tiny.llava_next()
    rows = [tiny.ONE_IMAGE, tiny.TWO_IMAGES]
    with tokred.apply(model, "sparsevlm", keep=0.5, recycle=True):
        together = model(**tiny.inputs("llava_next", rows)).logits[:, -1]
        for index, row in enumerate(rows):
            alone = model(**tiny.inputs("llava_next", [row])).logits[0, -1]
            torch.testing.assert_close(together[index], alone, atol=1e-5, rtol=1e-5)


def test_trace_follows_tokens_that_were_merged_twice():
    """Token 3 joins 1, which then joins 0; token 2 joins 4, which is dropped later."""
    report = CallReport("llava", 1, 8, [Span(0, 2, 7, MediaItem("image", 5))])
    samples = torch.tensor([0])
    report.merge(samples, torch.arange(2, 7)[None], torch.tensor([[-1, -1, 4, 1, -1]]))
    report.merge(samples, torch.tensor([[2, 3, 6]]), torch.tensor([[-1, 0, -1]]))
    assert report.merged_into().tolist() == [[-1, -1, -1, 2, 6, 2, -1, -1]]


def test_zip_adds_the_mean_of_what_joins():
    """Patch 3 is dominant; of the rest the two targets are patches 0 and 2, patch 1 joins 0 and patch 4 joins 2."""
    hidden = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [10000.0]]).unsqueeze(0)
    keys = torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [1, 1], [0.1, 1]]).unsqueeze(0)
    row = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.1]).view(1, 1, 5)
    zipped = zip_tokens(row, hidden, keys, dominant=1, contextual=2)
    assert zipped.dominant.tolist() == [[3]]
    assert zipped.targets.tolist() == [[0, 2]]
    assert zipped.contextual[0, :, 0].tolist() == [11.0, 10100.0]


def test_visionzip_gives_the_cls_token_a_free_place():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    with tokred.apply(model, "visionzip", num_tokens=8):
        features = model.model.get_image_features(batch["pixel_values"], return_dict=True).pooler_output[0]
    tower = model.model.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-2]
    cls = model.model.multi_modal_projector(tower[:, :1])[0, 0]
    alive = features[~features.isnan().any(-1)]
    assert len(alive) == 8
    assert any(torch.allclose(row, cls, atol=1e-5) for row in alive)


def _directions(*angles):
    """Keys of the given angles in multiples of a right angle, (N, 2)."""
    return torch.tensor([[math.cos(angle * math.pi / 2), math.sin(angle * math.pi / 2)] for angle in angles])


def test_prumerge_keeps_outliers_and_one_token_for_the_rest():
    """
    Quartiles of 1..8 and 20 are 3 and 7, so that 13 is the bound: the last token. It joins token 2, whose key is
    nearest. In the second image both nines lie above a bound of 0, and their nearest keys are each other's.
    """
    attention = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8, 20], [0, 0, 0, 0, 0, 0, 0, 9, 9]])
    keys = torch.stack([_directions(1, 1, 0.1, 1, 1, 1, 1, 1, 0), _directions(1, 1, 1, 1, 1, 1, 1, 0, 0)])
    hidden = torch.arange(1.0, 10).view(1, 9, 1).repeat(2, 1, 1)
    selection = tokred.PruMerge(neighbours=1).merge(attention, keys, hidden)
    assert selection.keep.tolist() == [[7, 8, -1], [6, 7, 8]]
    assert selection.rows[0, :2, 0].tolist() == [sum(a * a for a in range(1, 9)), 9 + 3 * 3]
    assert selection.rows[1, :, 0].tolist() == [0, 8 + 9 * 9, 9 + 9 * 8]
    assert selection.merged_into.tolist() == [[7, 7, 8, 7, 7, 7, 7, 7, -1], [6, 6, 6, 6, 6, 6, 6, -1, -1]]


def test_prumerge_outliers_lie_above_the_bound():
    """13 is the bound itself, which is no outlier."""
    attention = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8, 13]])
    selection = tokred.PruMerge().merge(attention, torch.ones(1, 9, 2), torch.ones(1, 9, 1))
    assert selection.keep.tolist() == [[8]]
    assert selection.rows.tolist() == [[[sum(range(1, 9)) + 13]]]


@pytest.mark.parametrize("length", [2, 3])
def test_prumerge_of_a_tiny_item_is_one_token(length):
    """So few values have no outlier; one token is left alone."""
    attention = torch.arange(1.0, length + 1)[None]
    selection = tokred.PruMerge().merge(attention, torch.ones(1, length, 2), torch.full((1, length, 1), 2.0))
    assert selection.keep.tolist() == [[length - 1]]
    assert selection.rows.tolist() == [[[2.0 * attention.sum()]]]
    assert selection.merged_into.tolist() == [[length - 1] * length]
    assert (tokred.PruMerge().count(length), tokred.PruMerge().count(1)) == (None, 1)


@pytest.mark.parametrize(
    ("attention", "count", "keep", "rows"),
    [
        ([0.5, 0.75, 0.5, 0.25], 1, [1], [20 + 0.5 * 10]),
        ([0.5, 0.75, 0.5, 0.25], 2, [1, 3], [20 + 0.5 * 10, 0.5 * 10 + 0.5 * 30 + 0.25 * 40]),
        ([0.5, 0.5, 0.5, 0.25], 3, [0, 1, 3], [10 + 0.5 * 20, 20 + 0.5 * 10, 0.5 * 30 + 0.25 * 40]),
    ],
)
def test_prumerge_with_a_budget(attention, count, keep, rows):
    """Tokens 0 and 1 have the same key, as have 2 and 3. Among equals the lowest token is kept."""
    hidden = torch.tensor([[[10.0], [20], [30], [40]]])
    method = tokred.PruMerge(num_tokens=count, neighbours=1)
    assert (method.count(4), method.count(1), tokred.PruMerge(num_tokens=9).count(4)) == (count, 1, 4)
    selection = method.merge(torch.tensor([attention]), _directions(0, 0, 1, 1)[None], hidden)
    assert selection.keep.tolist() == [keep]
    assert selection.rows[0, :, 0].tolist() == rows


def test_prumerge_has_no_more_neighbours_than_tokens():
    attention = torch.tensor([[4.0, 1, 2]])
    hidden = torch.tensor([[[1.0], [10], [100]]])
    selection = tokred.PruMerge(num_tokens=2).merge(attention, _directions(0, 1, 2)[None], hidden)
    assert selection.rows[0, :, 0].tolist() == [1 + 10 + 200, 10 + 200]
    alone = tokred.PruMerge(num_tokens=2, neighbours=0).merge(attention, _directions(0, 1, 2)[None], hidden)
    assert alone.rows[0, :, 0].tolist() == [1, 10 + 200]
    assert alone.merged_into.tolist() == [[-1, 2, 2]]


@pytest.mark.parametrize(
    ("length", "outliers", "exact", "expected"),
    [
        (17, (3, 5), False, [0, 2, 3, 4, 5, 6, 8, 10, 12, 14, 15, 16]),
        (17, (3, 5), True, [0, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16]),
        (4, (1,), False, [0, 1, 2, 3]),
        (4, (1,), True, [0, 1, 2, 3]),
        (9, (), False, [8]),
    ],
)
def test_prumerge_plus_takes_more_the_more_stand_out(length, outliers, exact, expected):
    """
    Two outliers of 17 are one of 8: every second token. The last one that is not chosen holds the rest: 15, or 16 as
    released, where the last token is no sample. One of four is every token, after which no rest is left, or the last
    one. Without outliers there are no samples.
    """
    attention = torch.ones(1, length)
    attention[0, list(outliers)] = 2.0
    method = tokred.PruMerge(plus=True, reference_exact=exact)
    selection = method.merge(attention, _noise(1, length, 4), _noise(1, length, 2))
    assert selection.keep.tolist() == [expected]


def test_prumerge_plus_shares_a_budget():
    """Of five tokens three go by attention; 0, 1, 3, 4, 6, 8 and 9 are left, of which 1 and 8 are spread."""
    attention = torch.tensor([[0.0, 0, 9, 0, 0, 9, 0, 9, 0, 0]])
    selection = tokred.PruMerge(num_tokens=6, plus=True).merge(attention, _noise(1, 10, 4), _noise(1, 10, 2))
    assert selection.keep.tolist() == [[1, 2, 5, 7, 8, 9]]


def test_prumerge_reads_the_last_layer_or_the_given_one():
    shape = tokred.ModelShape(num_layers=4, tower_layers=3, rowwise_projector=True)
    for layer, expected in ((None, 2), (0, 0)):
        [step] = tokred.PruMerge(layer=layer).plan(shape)
        assert step.needs == {Need.CLS_ROW.at(expected), Need.TOWER_HEAD_KEYS.at(expected)}
    with pytest.raises(tokred.errors.ParameterError, match=r"prumerge: layer=3 lies outside 0\.\.2"):
        tokred.PruMerge(layer=3).plan(shape)


@pytest.mark.parametrize(
    ("name", "value"), [("neighbours", -1), ("neighbours", 1.5), ("keep", 0), ("positions", "new"), ("layer", -1)]
)
def test_prumerge_refuses(name, value):
    with pytest.raises(tokred.errors.ParameterError, match=f"{name}={value!r}"):
        tokred.PruMerge(**{name: value})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 1, 4, 5]),
        ({"per_round": 1}, [0, 4, 5, 6]),
        ({"important_share": 0.75}, [0, 2, 5, 6]),
        ({"important_share": 1.0}, [0, 1, 2, 5]),
        ({"important_share": 0.0, "per_round": 1}, [3, 4, 5, 6]),
    ],
)
def test_vispruner_keeps_important_and_diverse_tokens(changes, expected):
    """
    By attention, 0 before 5: 0, 5, 2, 1, 3, 4, 6. Tokens 0, 2, 3 and 4 have one direction, 1 and 5 another, 6 a third.

    Half of the budget are 0 and 5. Dealt are (2, 3, 6) and (1, 4), and three may go at once: 1 and 4 are left. If one
    goes at a time: 2, which equals 4; then of (3, 1) and (6, 4) 3; then of (1, 4) and (6), all at right angles, 1.
    Three of the budget are 0, 5 and 2, and of (1, 4) and (3, 6) two go, then of (3) and (6) one.
    None of the budget: of (0, 2, 3, 6) and (5, 1, 4) 0; of (2, 6, 1) and (3, 5, 4) 2; of (1, 3, 4) and (6, 5) 1.
    """
    attention = torch.tensor([[9.0, 5, 6, 4, 3, 9, 2]])
    features = torch.eye(3)[[0, 1, 0, 0, 0, 1, 2]].unsqueeze(0)
    survivors = tokred.VisPruner(num_tokens=4, **changes).survivors(attention, features)
    assert survivors.tolist() == [expected]


@pytest.mark.parametrize(("share", "expected"), [(0.5, [1]), (1.0, [0])])
def test_vispruner_of_two_tokens(share, expected):
    """Half of one token is none: of the two the first is dealt into the half that shrinks."""
    attention = torch.tensor([[2.0, 1.0]])
    method = tokred.VisPruner(num_tokens=1, important_share=share)
    assert method.survivors(attention, torch.eye(2).unsqueeze(0)).tolist() == [expected]


@pytest.mark.parametrize(("alpha", "expected"), [(0, [0, 3, 5]), (1, [2, 5, 3]), (2, [5, 2, 3])])
def test_scope_weighs_coverage_by_attention(alpha, expected):
    """
    Three tokens of one direction, two of another, one of a third. The first gains are 3, 2 and 1 for all of a
    direction, 0 for a direction with a pick. Times attention 3, 3, 6, 4, 4, 5, times its square 3, 3, 12, 8, 8, 25.
    """
    attention = torch.tensor([[1.0, 1, 2, 2, 2, 5]])
    features = torch.eye(3)[[0, 0, 0, 1, 1, 2]].unsqueeze(0)
    assert tokred.SCOPE(num_tokens=3, alpha=alpha).picks(attention, features).tolist() == [expected]


@pytest.mark.parametrize(("method", "changes"), [("vispruner", {"important_share": 1.0}), ("scope", {})])
def test_attention_is_the_mean_over_heads_without_the_cls_token(method, changes):
    """Head means 0.3, 0.5, 0.1 and 0.4 over features at right angles: the second and the fourth patch."""
    rows = torch.tensor([[[9.0, 0.6, 0.1, 0.2, 0.0], [9.0, 0.0, 0.9, 0.0, 0.8]]])
    [step] = tokred.methods()[method](num_tokens=2, **changes).plan(tokred.ModelShape(num_layers=4, tower_layers=3))
    context = Context(torch.eye(4).unsqueeze(0), step.needs, lambda seen, text: rows, torch.arange(4)[None])
    assert step.select(context).keep.tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("vispruner", "important_share", 1.5),
        ("vispruner", "important_share", "half"),
        ("vispruner", "per_round", 0),
        ("scope", "alpha", -1),
        ("scope", "alpha", math.inf),
        ("scope", "scope", "total"),
    ],
)
def test_parameters_of_methods_for_cls_towers(method, name, value):
    with pytest.raises(tokred.errors.ParameterError, match=f"{name}={value!r}"):
        tokred.methods()[method](**{name: value})
