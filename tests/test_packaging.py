"""The wheel: what it installs, and that it works outside the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tokred

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy, so that no build folder appears in the checkout and none that lies there slips in.
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True, timeout=100)
    [built] = folder.glob("tokred-*.whl")
    return built


def test_no_foreign_top_level_names(wheel):
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "tokred",
        "tokred_evals",
        "tokred_integrations",
    }


def test_nothing_is_left_out(wheel):
    installed = set(zipfile.ZipFile(wheel).namelist())
    folders = {"tokred": "tokred", "evals": "tokred_evals", "integrations": "tokred_integrations"}
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    needed = [
        name
        for name in tracked.splitlines()
        if name.endswith((".py", "py.typed")) or name.startswith("evals/scenes/model/")
    ]
    assert len(needed) > 30
    missing = [name for name in needed if name.replace(*_rename(name, folders), 1) not in installed]
    assert not missing


def test_version_is_the_packages_own(wheel):
    assert wheel.name.startswith(f"tokred-{tokred.__version__}-")


def _rename(name: str, folders: dict[str, str]) -> tuple[str, str]:
    folder = name.split("/")[0]
    return folder, folders[folder]


def test_works_outside_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    program = """
import sys
import tokred, tokred_evals, tokred_integrations
assert tokred.__file__.startswith(sys.argv[1]), tokred.__file__
assert not {"transformers", "diffusers", "matplotlib"} & set(sys.modules), "importing tokred must stay light"
print(",".join(tokred.methods()))
"""
    # -P keeps the working directory off the path, PYTHONPATH comes before the editable install's finder.
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, str(target)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    assert "divprune" in result.stdout
