"""GSM8K's rows, of the hub and of the package."""

from __future__ import annotations

from decode.suites import gsm8k


def test_rows_of_hub_and_package() -> None:
    assert gsm8k.read({"question": "How many?"}, 4).id == "gsm8k-4"
    assert gsm8k.read({"prompt": "How many?", "id": "x"}, 4).content.startswith("How many?\n\nReason")
