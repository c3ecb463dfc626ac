"""The kernels' AVX512 branch on a processor without AVX512: its instructions become SIMDe's, which compute the same with AVX2, and the
tests of `specalign/kernels` run with that library.

    git clone https://github.com/simd-everywhere/simde
    python -m tests.avx512 simde

It takes some minutes and needs gcc. What it can't show is how fast the branch is, and `vpdpbusd` as it is spelt in assembly: here it
is an intrinsic. No test runs this.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from decode.cli import Parser
from specalign.common.errors import UserError, cli

HOUSE = Path(__file__).parents[1]
FLAGS = "-O2 -w -Wno-psabi -mavx2 -mfma -mf16c -fwrapv -pthread -fopenmp -fPIC -shared -DROWS512"

CHANGES = {
    "lanes.h": [
        ("#include <immintrin.h>", '#include "emulated.h"'),
        ('target("avx512f,avx2,fma")', 'target("avx2,fma")'),
    ],
    "bytes.h": [
        ('target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")', 'target("avx2,fma")'),
        (
            '__asm__("vpdpbusd %2, %1, %0" : "+v"(SUM) : "v"(P), "v"(R))',
            "(SUM) = simde_mm512_dpbusd_epi32(SUM, P, R)",
        ),
    ],
    "rows.c": [
        ('if (!__builtin_cpu_supports("avx512f")) return 0;', ""),
        ("eight_bits = __builtin_cpu_supports", "eight_bits = 1 || __builtin_cpu_supports"),
    ],
}
"""What each file says, and what it says here."""


def main() -> None:
    parser = Parser(
        prog="python -m tests.avx512",
        description="Do the kernels' AVX512 branch and its tests agree?",
    )
    parser.add_argument("simde", type=Path, help="a clone of SIMDe")
    args = parser.parse_args()
    if not (args.simde / "simde" / "x86" / "avx512.h").is_file():
        raise UserError(f"{args.simde}: no simde/x86/avx512.h in it; give a clone of SIMDe")
    with tempfile.TemporaryDirectory() as scratch:
        house = copy_tree(Path(scratch))
        emulate(house / "align" / "kernels", args.simde.resolve())
        python, paths = sys.executable, os.environ | {"PYTHONPATH": str(house)}
        opened = "import sys; from specalign.kernels.linear import opened; sys.exit(opened('_rows512') is None)"
        if subprocess.run([python, "-c", opened], cwd=house, env=paths).returncode:
            raise UserError(
                "the library was compiled and can't be opened: has this processor AVX2?"
            )
        tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/specalign/kernels"]
        sys.exit(subprocess.run(tests, cwd=house, env=paths).returncode)


def copy_tree(to: Path) -> Path:
    """What the kernels' tests read, copied into `to`."""
    for name in ("align", "decode", "tests", "recipes"):
        shutil.copytree(HOUSE / name, to / name)
    shutil.copy2(HOUSE / "pyproject.toml", to)
    return to


def emulate(kernels: Path, simde: Path) -> None:
    """Compile `_rows512` in this copy of `specalign/kernels`. Raises UserError where the sources are no longer what is changed here."""
    used: set[str] = set()
    for path in (*kernels.glob("*.h"), *kernels.glob("*.c")):
        text = path.read_text()
        used |= set(re.findall(r"_mm512_\w+|_mm_maskz?_\w+", text))
        used |= {f"_mm512_{name}" for name in re.findall(r"_mm##W##_(\w+)", text)}
        for before, after in CHANGES.get(path.name, []):
            if before not in text:
                raise UserError(
                    f"{path.name} has no {before!r} any more; mend CHANGES of tests/avx512.py"
                )
            text = text.replace(before, after)
        path.write_text(text)
    names = [f"#undef {name}\n#define {name} simde{name}" for name in sorted(used)]
    types = [f"#define __m512{kind} simde__m512{kind}" for kind in ("", "i", "d")]
    head = ["#include <immintrin.h>", '#include "simde/x86/avx512.h"']
    (kernels / "emulated.h").write_text("\n".join([*head, *names, *types, ""]))
    library = f"_rows512{EXTENSION_SUFFIXES[0]}"
    sources = [path.name for path in sorted(kernels.glob("*.c"))]
    command = ["gcc", *FLAGS.split(), f"-I{simde}", *sources, "-o", library, "-lm"]
    subprocess.run(command, cwd=kernels, check=True)


if __name__ == "__main__":
    cli(main)()
