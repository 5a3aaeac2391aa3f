"""Properties of single methods that no golden file pins."""

import pytest
import tiny
import torch

import tokred
from tokred import Context, Need, Observation, Stage
from tokred.adapters import grid_cells
from tokred.errors import UndeclaredObservationError
from tokred.vision.visionzip import zip_tokens


def _noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("length", [1, 2, 5, 16, 37])
@pytest.mark.parametrize("method", sorted(tokred.methods()))
def test_every_method_keeps_its_budget(method, length, keep):
    built = tokred.methods()[method](keep=keep)
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
        Need.TOWER_KEYS: _noise(groups, length + (step.stage is not Stage.ENCODER_BLOCK), 8),
        Need.CLS_HIDDEN: _noise(groups, 1, 8),
        Need.LAST_ROW: _noise(groups, 2, length).softmax(-1),
        Need.NEXT_ROW: _noise(groups, 2, length).softmax(-1),
        Need.TEXT_ROWS: _noise(groups, 2, text, length + text).softmax(-1),
        Need.LAYER_KEYS: _noise(groups, length + text, 8),
        Need.NORMED_HIDDEN: _noise(groups, length + text, 8, seed=1),
        Need.COLUMN_SUM: _noise(groups, length).softmax(-1),
        Need.GRID: grid_cells(1, 1, length).expand(groups, -1, -1),
    }

    def provide(observation, of_text):
        whole = made[observation.need]
        if observation.need in (Need.LAYER_KEYS, Need.NORMED_HIDDEN):
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
