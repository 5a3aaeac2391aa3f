"""The `tokred` command on a tiny checkpoint that goes through its processor and chat template."""

import csv
import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from tokred_evals import cli, evaluate, measure, report, scenes
from tokred_evals.scenes import model as scene_model
from transformers import (
    BertConfig,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from typer.testing import CliRunner

import tokred

SIDE, PATCH = 24, 4
FAST = ("--rounds", 1, "--threads", 1)
WORDS = ["<pad>", "<end>", "<unk>", "<image>", "user", "assistant", "red", "blue", "one", "two", "which", "how", "many"]
TEMPLATE = (
    "{% for m in messages %}user {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a tiny LLaVA with its processor, as a user would save it."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )
    pictures = CLIPImageProcessor(size={"height": SIDE, "width": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    LlavaProcessor(
        image_processor=pictures,
        tokenizer=fast,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config={"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, **sizes},
            text_config=Qwen2Config(vocab_size=len(WORDS), num_key_value_heads=2, **sizes).to_dict(),
            image_token_index=WORDS.index("<image>"),
            image_seq_length=(SIDE // PATCH) ** 2,
        )
    )
    model.generation_config.eos_token_id = WORDS.index("<end>")
    model.generation_config.pad_token_id = WORDS.index("<pad>")
    model.save_pretrained(folder)
    return folder


def _picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))


@pytest.fixture
def task(monkeypatch, checkpoint):
    """A task of its own: every answer of the stock model to even questions counts as right."""
    model, processor = evaluate.load_model(str(checkpoint))

    def questions(count):
        made = []
        for index in range(count):
            text = "how many red" if index % 3 else "which"
            picture = _picture(index)
            [found] = evaluate.answer(model, processor, evaluate.encode(processor, [(picture, text)], model))
            right = found if index % 2 == 0 else "no such word"
            made.append(evaluate.Question(picture, text, right, "colour" if index % 3 else "shape"))
        return made

    monkeypatch.setitem(evaluate.TASKS, "tiny", evaluate.Task(questions, lambda: str(checkpoint)))
    return "tiny"


def _run(*arguments):
    # Usage errors are folded to the terminal's width, which could split the path that a test looks for.
    return CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, [str(argument) for argument in arguments])


def test_list_names_every_method_and_family():
    ran = _run("list")
    assert ran.exit_code == 0, ran.output
    for name in [*tokred.methods(), *tokred.adapters()]:
        assert name in ran.stdout
    assert "decoder_layer 2" in ran.stdout
    assert "keep=0.25" in ran.stdout


def test_check_reads_the_config_alone(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    ran = _run("check", tmp_path)
    assert ran.exit_code == 0, ran.output
    assert "supported: llava" in ran.stdout
    assert "visionzip" in ran.stdout


def test_check_says_why_not(tmp_path):
    BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8).save_pretrained(tmp_path)
    ran = _run("check", tmp_path)
    assert ran.exit_code == 1
    assert "not supported" in ran.stdout
    assert "bert" in ran.stdout


def test_check_of_nothing_is_one_line(tmp_path):
    ran = _run("check", tmp_path / "nowhere")
    assert ran.exit_code == 2
    assert ran.stderr.count("\n") == 1
    assert "nowhere" in ran.stderr


@pytest.mark.parametrize("method", sorted(tokred.methods()))
def test_show_writes_an_overlay(checkpoint, tmp_path, method):
    _picture(0).save(tmp_path / "in.png")
    out = tmp_path / "deep" / "out.png"
    ran = _run("show", tmp_path / "in.png", "--method", method, "--keep", 0.25, "--model", checkpoint, "--out", out)
    assert ran.exit_code == 0, ran.output
    assert "stock:" in ran.stdout
    assert "36 -> 9 visual tokens" in ran.stdout
    with Image.open(out) as picture:
        assert min(picture.size) >= SIDE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--method": "nope"}, "nope"),
        ({"--keep": 0}, "keep=0"),
        ({"--keep": 1.5}, "keep=1.5"),
        ({"--model": "nowhere"}, "nowhere"),
        ({"image": "missing.png"}, "missing.png"),
    ],
)
def test_show_refuses_bad_input_in_one_line(checkpoint, tmp_path, changes, message):
    _picture(0).save(tmp_path / "in.png")
    options = {"--model": checkpoint, "--out": tmp_path / "out.png"} | changes
    image = options.pop("image", tmp_path / "in.png")
    ran = _run("show", image, *(part for pair in options.items() for part in pair))
    assert ran.exit_code == 2
    assert ran.stderr.count("\n") == 1
    assert message in ran.stderr
    assert not (tmp_path / "out.png").exists()


def test_eval_writes_tables_files_plot_and_overlays(task, tmp_path):
    out = tmp_path / "results"
    ran = _run(
        "eval",
        "--task",
        task,
        "--methods",
        ",".join(tokred.methods()),
        "--keep",
        "1,0.25",
        "--questions",
        8,
        "--batch",
        4,
        *FAST,
        "--seeds",
        "0,1",
        "--out",
        out,
    )
    assert ran.exit_code == 0, ran.output
    for part in (
        "accuracy (95 %)",
        "colour (n=5)",
        "shape (n=3)",
        "token_layers",
        "prefill ms x1",
        "equal token_layers",
    ):
        assert part in ran.stdout
    result = json.loads((out / "eval.json").read_text())
    rows = {(row["method"], row["keep"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 1 + 2 * len(tokred.methods())
    assert result["settings"]["questions"] == 8
    assert result["machine"]["versions"]["torch"] == torch.__version__

    stock = rows["stock", 1.0]
    # the task calls every other stock answer right; batching and padding must not change an answer
    assert stock["accuracy"] == 0.5
    assert stock["visual_tokens"] == 36
    for method in tokred.methods():
        full, quarter = rows[method, 1.0], rows[method, 0.25]
        assert (full["accuracy"], full["same_answers"], full["token_layers"]) == (0.5, 1.0, 1.0)
        assert full["visual_tokens"] == 36
        assert quarter["visual_tokens"] == 9
        within = dict.fromkeys(("dart", "fastv"), (2 + 0.25) / 3)
        within["corematching"] = (1 + 2 * 0.25) / 3
        within |= dict.fromkeys(("adaptinfer", "pyramiddrop", "sparsevlm"), (1 + 0.5 + 0.25) / 3)
        assert quarter["token_layers"] == pytest.approx(within.get(method, 0.25))
        assert quarter["own_ms"] > 0
        assert quarter["lo"] <= quarter["accuracy"] <= quarter["hi"]
        assert quarter["seeds"] == (2 if method == "random" else 1)
        assert (out / f"overlay_{method}.png").exists()
    with (out / "eval.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert float(lines[0]["colour_accuracy"]) == stock["kinds"]["colour"]["accuracy"]
    with Image.open(out / "pareto.png") as plot:
        assert min(plot.size) > 400


def test_eval_json_goes_to_stdout_alone(task, tmp_path):
    arguments = ["--methods", "uniform", "--keep", "0.5", "--questions", 4, *FAST, "--out", tmp_path, "--json"]
    ran = _run("eval", "--task", task, *arguments)
    assert ran.exit_code == 0, ran.output
    assert [row["method"] for row in json.loads(ran.stdout)["rows"]] == ["stock", "uniform"]
    assert "token_layers" in ran.stderr


def test_config_file_gives_defaults_that_the_command_line_overrides(task, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"task: {task}\nmethods: [uniform, random]\nkeep: 0.5\nquestions: 4\nrounds: 1\nthreads: 1\nout: {tmp_path}\n"
    )
    ran = _run("eval", "--config", file, "--methods", "uniform", "--json")
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert [(row["method"], row["keep"]) for row in result["rows"]] == [("stock", 1.0), ("uniform", 0.5)]
    assert result["settings"]["questions"] == 4


@pytest.mark.parametrize("text", ["keeps: 0.5", "- a", "a: [", None])
def test_config_file_with_errors_is_refused(tmp_path, text):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    ran = _run("eval", "--config", file)
    assert ran.exit_code == 2
    assert "run.yaml" in " ".join(ran.stderr.split())


def test_budget_asks_fewer_questions_but_never_too_few(task, tmp_path, checkpoint):
    plan = evaluate.Plan(task=task, methods=("uniform",), keeps=(0.5,), questions=200, batch=4, budget_s=1e-6)
    model, processor = evaluate.load_model(str(checkpoint))
    questions = evaluate.TASKS[task].questions(8)
    assert evaluate._fitting_questions(plan, model, processor, questions) == evaluate.MIN_QUESTIONS
    large = evaluate.Plan(task=task, methods=("uniform",), keeps=(0.5,), questions=200, batch=4, budget_s=1e6)
    assert evaluate._fitting_questions(large, model, processor, questions) == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "nope"], "nope"),
        (["--methods", ""], "list of methods is empty"),
        (["--keep", "0"], "keep=0"),
        (["--keep", "x"], "--keep 'x'"),
        (["--task", "nope"], "there are scenes"),
        (["--dtype", "int3"], "int3"),
        (["--device", "abacus"], "abacus"),
        (["--questions", "0"], "questions=0"),
        (["--seeds", "1.5"], "--seeds '1.5'"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_eval_refuses_bad_input_in_one_line(tmp_path, arguments, message):
    ran = _run("eval", "--out", tmp_path, *arguments)
    assert ran.exit_code == 2
    assert ran.stderr.count("\n") == 1
    assert message in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_demo_is_an_evaluation_within_a_budget(monkeypatch, tmp_path):
    plans = []
    monkeypatch.setattr(cli, "_run_eval", lambda *arguments: plans.append(arguments))
    assert _run("demo", "--out", tmp_path).exit_code == 0
    [(plan, out, as_json, threads)] = plans
    assert set(plan.methods) == set(cli.DEFAULT_METHODS.split(",")) <= set(tokred.methods())
    assert plan.keeps == (1.0, 0.5, 0.25, 0.1)
    assert (plan.model, plan.task, out, as_json, threads) == (None, "scenes", tmp_path, False, None)
    assert plan.budget_s <= 240
    plan.check()


def test_measuring_commands_restart_and_others_do_not(monkeypatch):
    restarts, started = [], []
    monkeypatch.setattr(cli, "restart_with_allocator", lambda: restarts.append(1))
    monkeypatch.setattr(cli, "app", lambda: started.append(1))
    for arguments, expected in ((["list"], 0), (["bench", "prefill", "--smoke"], 0), (["demo"], 1), (["eval"], 1)):
        restarts.clear()
        monkeypatch.setattr(cli.sys, "argv", ["tokred", *arguments])
        cli.main()
        assert len(restarts) == expected, arguments
    assert len(started) == 4


def test_equal_token_layers_interpolates_and_never_extrapolates():
    rows = [
        {"method": "stock", "token_layers": 1.0, "accuracy": 0.9},
        {"method": "a", "token_layers": 0.5, "accuracy": 0.7},
        {"method": "b", "token_layers": 0.25, "accuracy": 0.4},
    ]
    table = evaluate.at_equal_token_layers(rows, (0.75, 0.25))
    assert table == {"a": [pytest.approx(0.8), None], "b": [pytest.approx(0.4 + 0.5 * 2 / 3), 0.4]}


def test_labels_keep_a_gap():
    places = report._spread([0.5, 0.5, 0.51, 0.9], 0.1)
    ordered = sorted(places)
    assert all(after - before >= 0.1 - 1e-9 for before, after in itertools.pairwise(ordered))


def test_plain_lists_are_parsed_without_repetition():
    assert measure.parse_names(" a, b,a,, ") == ["a", "b"]
    assert measure.parse_numbers("1,0.5") == [1.0, 0.5]


def test_scenes_go_through_the_whole_path(tmp_path):
    model, processor = scene_model.build_model(), scene_model.build_processor()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    arguments = ["--methods", "divprune", "--keep", 0.25, "--questions", 16, *FAST, "--out", tmp_path / "results"]
    ran = _run("eval", "--model", tmp_path / "model", *arguments)
    assert ran.exit_code == 0, ran.output
    result = json.loads((tmp_path / "results" / "eval.json").read_text())
    assert [row["visual_tokens"] for row in result["rows"]] == [196, 49]
    assert all(set(row["kinds"]) == set(scenes.KINDS) for row in result["rows"])
    assert (tmp_path / "results" / "overlay_divprune.png").exists()


def test_scene_questions_are_always_the_same():
    first, longer = evaluate.TASKS["scenes"].questions(9), evaluate.TASKS["scenes"].questions(12)
    assert [question.text for question in first] == [question.text for question in longer[:9]]
    assert first[0].image.tobytes() == longer[0].image.tobytes()
