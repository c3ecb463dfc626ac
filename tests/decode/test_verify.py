"""The verify command on the debug target."""

import json
from pathlib import Path
from unittest import mock

import pytest

from decode.verification import batches, rules, self_test
from decode.verification.pair import VerifyConfig
from decode.verify import main
from specalign.common.errors import UserError
from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target
from tests.builders import block_network as network


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pair") / "drafter"
    save_drafter(network(load_target("debug", dtype="float32", device="cpu"), "shared_kv"), folder)
    return str(folder)


def arguments(drafter: str, out: Path) -> list[str]:
    short = ["--suite", "builtin", "--limit", "2", "--max-new-tokens", "12"]
    return ["--target", "debug", "--drafter", drafter, *short, "--out", str(out)]


def test_compiled_rounds_are_refused() -> None:
    with pytest.raises(UserError, match="use captured"):
        VerifyConfig(engine="compiled").load_prompts()


@pytest.mark.slow
def test_a_right_pair(drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments(drafter, tmp_path))
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert record["lossless"] and record["pair"]["prompts"] == 2
    assert not (tmp_path / "replay.json").exists()
    counts = {check["check"]: check["counts"] for check in record["checks"]}
    assert list(counts) == ["rows", "proposals", "rule", "randomness", "commit", "end_to_end"]
    assert counts["rows"]["logits of a node"] > 500
    assert counts["proposals"]["drafted token against its q, total variation"] > 50
    assert counts["randomness"]["outcomes of rounds"] > 200
    assert {name for name in counts["commit"] if name.startswith("ended")} == {
        f"ended by {why}" for why in ("length", "eos", "stop", "context")
    }
    page = (tmp_path / "verdict.md").read_text()
    assert page.startswith("# LOSSLESS") and page in capsys.readouterr().out


@pytest.mark.slow
def test_differences_replay(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = batches.settings
    monkeypatch.setattr(batches, "settings", lambda *given: every(*given)[::2])
    monkeypatch.setattr(rules, "check_rules", lambda tally, rounds: None)
    patch, _ = self_test.no_min_p()
    with mock.patch.object(*patch):
        with pytest.raises(SystemExit) as ended:
            main([*arguments(f"block={drafter}", tmp_path), "--methods", "block"])
        assert ended.value.code == 1
        page = (tmp_path / "verdict.md").read_text()
        assert page.startswith("# NOT LOSSLESS: 1 of 6 checks")
        place = json.loads((tmp_path / "replay.json").read_text())["finding"]["place"]
        assert {"request", "round", "batch", "asked", "text", "drafts", "outcome"} <= {*place}
        replay = ["--replay", str(tmp_path / "replay.json"), "--out", str(tmp_path / "again")]
        with pytest.raises(SystemExit):
            main(replay)
    main(replay)
    again = json.loads((tmp_path / "again" / "verdict.json").read_text())
    assert again["lossless"] and again["checks"][0]["counts"]["logits of a node"] > 0
    record = json.loads((tmp_path / "replay.json").read_text())
    record["finding"]["place"]["batch"] = "another"
    (tmp_path / "replay.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="decode no batch 'another'"):
        main.__wrapped__(replay)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"options\.limits is unknown.*'limit'"):
        VerifyConfig.read_options({"limits": 2}, "replay.json")
