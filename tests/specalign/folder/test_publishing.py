"""What is uploaded names no path of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from specalign.folder.publishing import published_texts


def test_texts_that_name_the_path_name_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a & b" / "my finetune"
    target.mkdir(parents=True)
    out = tmp_path / "out"
    (out / "code").mkdir(parents=True)
    (out / "README.md").write_text(f"for {target} and {tmp_path}/a &amp; b/my finetune\n")
    (out / "export.json").write_text(f'{{"target": "{target}"}}')
    (out / "code" / "run.py").write_text(f"open({str(target)!r})")
    (out / "other.md").write_text("nothing")
    (out / "model.safetensors").write_bytes(str(target).encode())
    monkeypatch.chdir(tmp_path)
    for name in (str(target), "a & b/my finetune"):
        texts = published_texts(out, name)
        assert set(texts) == {"README.md", "export.json", "code/run.py"}
        assert all(str(tmp_path) not in text and "my finetune" in text for text in texts.values())
    assert published_texts(out, "owner/model") == published_texts(out, "debug") == {}
