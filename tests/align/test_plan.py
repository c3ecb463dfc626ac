"""The command: a page, an exit code."""

from pathlib import Path

import pytest

from align.plan import main


@pytest.mark.slow
def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipe=debug_block", f"output={tmp_path / 'run'}"])
    page = capsys.readouterr().out
    assert "everything fits in memory" in page and "a short trial on the device" not in page
    assert not (tmp_path / "run").exists()


def test_other_machines_need_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, '
        '"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}'
    )
    words = ["recipe=smollm2_block", f"target.name={folder}", f"output={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--hardware", "h100"])
    page = capsys.readouterr().out
    assert stop.value.code == 1 and "weights not found locally" in page
    assert "70,553.7M parameters" in page and "DOES NOT FIT: training takes" in page


def test_an_unknown_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["recipe=debug_block", "--hardware", "h1000"])
    assert stop.value.code == 2 and "did you mean 'h100'" in capsys.readouterr().err
