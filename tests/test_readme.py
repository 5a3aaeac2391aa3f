"""The README's first code block runs as written."""

import re
from pathlib import Path

import torch


def test_first_code_block_runs(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    with torch.enable_grad():
        exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "kept.png").stat().st_size > 0
    assert "49" in capsys.readouterr().out
