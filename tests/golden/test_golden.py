"""Golden vectors: every case of every reference implementation, against ours.

`TOKRED_GOLDEN` names another directory of the same layout, so that other vectors run through the same tests.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

import tokred
from tokred import DART, CoreMatching, DivPrune, FastV, HiPrune, PyramidDrop, Selection, SparseVLM
from tokred.adapters import grid_cells
from tokred.kernels import gather, topk_indices
from tokred.merging import Tokens
from tokred.observe import Seen
from tokred.vision._common import attention_score, survivors
from tokred.vision.adaptinfer import weighted_attention
from tokred.vision.corematching import affinity, elbow
from tokred.vision.sparsevlm import merge_clusters, rated_by_head, raters_of, relevance, strongest_heads
from tokred.vision.tome import merge, pair_tokens, pair_with_every, schedule
from tokred.vision.visionzip import zip_tokens

ROOT = Path(os.environ.get("TOKRED_GOLDEN", Path(__file__).parent))

# Systems without an implementation yet, and the issue that brings it.
LATER = {
    "vision": (
        3,
        "ficoco_l ficoco_v flowcut globalcom2 hired zerotprune_wpr",
    ),
    "video": (4, "dtd dycoke evs fastvid framefusion holitom llava_scissor prunevid vidcom2"),
    "diffusion": (
        5,
        "asymrnr cachedit_dbcache cat_pruning diffusers_hooks fastvar fbcache_paraattention importance_merge "
        "magcache_reference magcache_wan rettention sada taylorseer teacache toca_dit tomesd_block tomesd_matching",
    ),
    "audio": (6, "adjacent_merge atome_whisper kv_windows omnizip"),
}


def _dart(given, params):
    method = DART(
        keep=1 - params["reduction_ratio"],
        num_tokens=params["max_num_trunction"],
        pivots_image=params["pivot_image"],
        pivots_text=params["pivot_text"],
        reference_exact=True,
    )
    start, length = params["start"], params["length"]
    hidden, keys = given["h"], given["k"].transpose(1, 2).flatten(2)
    places = torch.arange(hidden.shape[1]).unsqueeze(0)
    image, text = slice(start, start + length), slice(start + length, None)
    groups = [(hidden[:, part], keys[:, part], places[:, part]) for part in (image, text)]
    norms = keys.abs().sum(-1)
    return {
        "kept": method.survivors(*groups)[0] + start,
        "pivots_img": topk_indices(norms[:, image], method.pivots_image)[0] + start,
        "pivots_txt": topk_indices(norms[:, text], method.pivots_text)[0] + start + length,
    }


def _divprune(given, params):
    method = DivPrune(keep=params["ratio"], reference_exact=True)
    features = given["x"].unsqueeze(0)
    assert method.count(features.shape[1]) == params["count"]
    return {"selected": method.picks(features)[0]}


def _fastv(given, params):
    start, length = params["start"], params["length"]
    score = attention_score(given["attn_last_row"][..., start : start + length])[0]
    method = FastV(num_tokens=params["rank"])
    media = survivors(score[None], method.count(length))[0] + start
    size = given["attn_last_row"].shape[-1]
    return {"score": score, "keep": torch.cat([torch.arange(start), media, torch.arange(start + length, size)])}


def _hiprune(given, params):
    if "grid_h" in params:
        rows, columns, budget = params["grid_h"], params["grid_w"], params["budget"]
    else:
        columns, budget = params["grid_width"], params["per_view"]
        rows = params["N"] // columns
    method = HiPrune(num_tokens=budget, alpha=params["alpha"], reference_exact=True)
    shallow, deep = (given[name].view(-1, rows * columns) for name in ("shallow", "deep"))
    grid = grid_cells(1, rows, columns).expand(len(deep), -1, -1)
    survivors = method.survivors(shallow, deep, grid)
    kept = torch.zeros_like(deep, dtype=torch.bool).scatter_(1, survivors, True)
    if "seq_len" not in params:
        return {"keep_mask": kept}
    sequence = torch.ones(params["seq_len"], dtype=torch.bool)
    sequence[params["image_start"] : params["image_start"] + rows * columns] = kept[0]
    return {
        "select_mask": kept[0],
        "sequence_keep_mask": sequence,
        "position_ids_kept": sequence.nonzero()[:, 0],
    }


def _pyramiddrop(given, params):
    """Samples without padding, one by one, put together as the reference pads them."""
    method = PyramidDrop(reference_exact=True)
    hidden, results = given["h"], {}
    rows = []
    for sample, (start, text, current, total) in enumerate(
        zip(params["image_start"], params["prompt_len_without_image"], params["current"], params["image_tokens"])
    ):
        length = text + current
        kept = torch.arange(length)
        if current:
            alone = hidden[sample : sample + 1, :length]
            query, key = (
                (alone @ given[name].T).unflatten(2, (params["heads"], -1)).transpose(1, 2) for name in ("wq", "wk")
            )
            seen = Seen(query, key, query.shape[-1] ** -0.5)
            row = seen.rows(torch.tensor([length - 1]))[..., start : start + current]
            count = method.step_count((params["stage"] + 1) / 3, total, current)
            assert count == params["keep"][sample]
            media = survivors(attention_score(row), count)[0] + start
            kept = torch.cat([torch.arange(start), media, torch.arange(start + current, length)])
        results[f"keep_{sample}"] = kept
        rows.append(hidden[sample, kept])
    lengths = torch.tensor([len(row) for row in rows])
    places = torch.arange(int(lengths.max())).expand(len(rows), -1)
    results["h"] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    results["attention_mask"] = (places < lengths[:, None]).to(given["attention_mask"].dtype)
    results["position_ids"] = places * results["attention_mask"]
    return results


# Budgets of the release for LLaVA: what is left after layers 1, 10 and 20.
_ADAPTINFER = {64: {1: 133, 10: 27, 20: 3}, 32: {1: 40, 10: 12, 20: 0}}


def _adaptinfer(given, params):
    media = slice(params["start"], params["start"] + params["V"])
    rows = given["attn_text"]
    score = weighted_attention(rows[..., media.stop :], rows[..., media])
    if params["keep_ratio"] is None:
        count = min(_ADAPTINFER[params["retained"]][params["layer"]], params["V"] - 1)
    else:
        count = max(1, min(int(params["keep_ratio"] * params["V"]), params["V"]))
    mask = torch.zeros_like(score, dtype=torch.bool).scatter_(1, survivors(score, count), True)
    # The port for Qwen returns the mask alone.
    return {"mask": mask} if params["keep_ratio"] else {"mask": mask, "score": score}


def _corematching(given, params):
    """The query is counted from the end of the text, which follows the image."""
    active = given["active"].bool().unsqueeze(0)
    start, stop = params["image_start"], params["image_start"] + params["image_length"]
    media, text = active[:, start:stop], active[:, stop:]
    score = affinity(media, text[:, -CoreMatching().query])
    place, value = elbow(score)
    kept = CoreMatching().survivors(media, text)[0]
    return {"affinity": score[0], "elbow_index": place[0], "elbow_value": value[0], "kept": kept}


# Budgets of the release for LLaVA, version 1: what is left after layers 2, 6 and 15.
_SPARSEVLM = {192: {2: 300, 6: 200, 15: 110}, 64: {2: 66, 6: 30, 15: 17}}


def _sparsevlm(given, params):
    if "h_v" in given:
        share = relevance(given["h_v"], given["h_t"])
        return {"m": share, "raters": raters_of(share)[0].nonzero()[:, 0]}
    if "x" in given:
        return {"merged": merge_clusters(given["x"], params["clusters"])[1]}
    if "attn" in given:
        text = params["text_start"]
        rows = given["attn"][:, :, text:, params["v_start"] : text]
        raters = torch.zeros(1, rows.shape[2], dtype=torch.bool).index_fill_(1, given["raters_abs"] - text, True)
        return {"head_idx": strongest_heads(rated_by_head(rows, raters), 14)[0]}
    rows, length = given["attn_text_to_vis"], params["V"]
    method = SparseVLM(num_tokens=_SPARSEVLM[params["retain"]][params["layer"]], heads=1.0, reference_exact=True)
    count = method.step_count(1.0, length, length)
    assert count == params["budget"]
    raters = torch.zeros(1, params["text"], dtype=torch.bool).index_fill_(1, given["raters"], True)
    score = method.rate(rows, raters)
    mask = torch.zeros_like(score, dtype=torch.bool).scatter_(1, survivors(score, count), True)
    return {"score": score, "mask": mask}


def _visionzip(given, params):
    cls_row, hidden, keys = given["attn_cls"], given["hidden"], given["metric"]
    zipped = zip_tokens(cls_row[..., 1:], hidden[:, 1:], keys[:, 1:], params["dominant"], params["contextual"])
    first = torch.zeros(len(hidden), 1, dtype=torch.long)
    index = torch.cat([first, zipped.dominant + 1], dim=1)
    return {"idx": index, "tokens": torch.cat([gather(hidden, index.sort(dim=1).values), zipped.contextual], dim=1)}


def _tome(given, params):
    if "layers" in params:
        r, inflect = params["r"] if params["is_tuple"] else (params["r"], 0.0)
        return {"schedule": torch.tensor(schedule(params["layers"], tuple(r) if isinstance(r, list) else r, inflect))}
    keys, x = given["metric"], given["x"]
    if "k" in params:
        pairs = pair_with_every(keys, params["k"], prefix=0)
    else:
        assert not params["distill_token"]
        pairs = pair_tokens(keys, params["r"], prefix=int(params["class_token"]))
        assert pairs.sources.shape[1] == params["effective_r"]
    ones = torch.ones(keys.shape[:2])
    sizes = given["size"][..., 0] if "size" in given else ones
    merged_into = torch.full(keys.shape[:2], -1).scatter_(1, pairs.sources, pairs.targets)
    tokens = Tokens(*keys.shape[:2], keys.device)
    tokens.sizes = sizes
    tokens.reduce(Selection(pairs.keep, merged_into=merged_into))
    merged = merge(x, sizes, pairs)
    found = {"merged_x": merged, "size_out": tokens.sizes[..., None], "unmerged": tokens.restore(merged)}
    if "k" not in params:
        source = torch.zeros(len(x), merged.shape[1], x.shape[1])
        found["source"] = source.scatter_(1, tokens.places[:, None], 1.0)
        found["mean_x"] = merge(x, ones, pairs)
    return found


def _tome_vit_e2e(given, params):
    model = VisionTransformer(
        img_size=32, patch_size=4, embed_dim=24, depth=4, num_heads=3, mlp_ratio=2, num_classes=10
    ).eval()
    weights = {name: x for name, x in given.items() if name.startswith("weights.")}
    model.load_state_dict({name.removeprefix("weights."): x for name, x in weights.items()})
    r, inflect = params["r"] if params["is_tuple"] else (params["r"], 0.0)
    counts = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: counts.append(output.shape[1]))
    with (
        torch.no_grad(),
        tokred.apply(model, "tome", r=r, inflect=inflect, prop_attn=params["prop_attn"], restore=False) as handle,
    ):
        found = {"logits": model(given["images"]), "tokens_after_block": torch.tensor(counts)}
        report = handle._session.statistics.last
    if report is not None:
        tokens = report.block.tokens
        source = torch.zeros(len(given["images"]), *tokens.sizes.shape[1:], tokens.length)
        found["size_final"] = tokens.sizes[..., None]
        found["source_final"] = source.scatter_(1, tokens.places[:, None], 1.0).to(torch.uint8)
    return found


SYSTEMS = {
    "vision": {
        "adaptinfer": _adaptinfer,
        "corematching": _corematching,
        "dart": _dart,
        "divprune": _divprune,
        "fastv": _fastv,
        "hiprune": _hiprune,
        "pyramiddrop": _pyramiddrop,
        "sparsevlm": _sparsevlm,
        "tome": _tome,
        "tome_vit_e2e": _tome_vit_e2e,
        "visionzip": _visionzip,
    },
}


def _distinct(case):
    """Picks that mean something: those before all distinct rows are used up (the file's notes on c7)."""
    return min(case["params"]["unique"], case["params"]["count"])


def _cases():
    for area, systems in SYSTEMS.items():
        for system in systems:
            for case in json.loads((ROOT / area / f"{system}.json").read_text())["cases"]:
                yield pytest.param(area, system, case, id=f"{system}-{case['id']}")


@pytest.mark.parametrize(("area", "system", "case"), list(_cases()))
def test_equals_the_reference(area, system, case):
    tensors = load_file(ROOT / area / f"{system}.safetensors")
    prefix = f"{case['id']}."
    given = {name[len(prefix) + 3 :]: x for name, x in tensors.items() if name.startswith(prefix + "in.")}
    # Some files hold a model that their cases share.
    given |= {name: x for name, x in tensors.items() if ".in." not in name and ".out." not in name}
    expected = {name[len(prefix) + 4 :]: x for name, x in tensors.items() if name.startswith(prefix + "out.")}
    found = SYSTEMS[area][system](given, case["params"])
    # The order of visits and the distances are internals that the kept set pins already.
    assert set(expected) - set(found) <= {"order", "dist"}
    for name, value in found.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5)
        elif system == "divprune":
            assert value[: _distinct(case)].tolist() == expected[name][: _distinct(case)].tolist()
        else:
            assert value.tolist() == expected[name].tolist(), name


def test_every_system_is_implemented_or_listed():
    for area, (_, names) in LATER.items():
        files = {path.stem for path in (Path(__file__).parent / area).glob("*.json")}
        assert files == set(SYSTEMS.get(area, ())) | set(names.split())
