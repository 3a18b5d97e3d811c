#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Converts a Weaver checkpoint from a torch file (.pth, .pt) to .safetensors with its config as JSON.

    python scripts/convert_weaver.py weaver/qwen36_27b_weaver.pth weaver-safetensors/

Reads with `weights_only=True`, so nothing in the file is run. The numbers are not changed: the result is read
back and compared bit for bit. A file with the name of a published checkpoint must have its SHA-256; another
digest is expected with --sha256. Ends with the digests of both files, or with one line that says what is
wrong (exit code 1).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_weaver.spec_decode.weaver_checkpoint import (
    PUBLISHED_SHA256,
    load_weaver,
    resolve_weaver,
    same_numbers,
    save_weaver,
)


def convert(source: str, folder: Path, sha256: str | None = None, revision: str | None = None) -> list[str]:
    """Converts `source` (a path, or repo[:file] on the hub) into `folder`; returns the lines to print.

    Raises ValueError, one sentence, for a file that is not what it should be or a result that exists."""
    path = resolve_weaver(source, revision, sha256)
    if path.suffix == ".safetensors":
        raise ValueError(f"{str(path)!r} is a .safetensors file already; nothing needs doing.")
    actual = _digest(path)
    published = PUBLISHED_SHA256.get(path.name)
    if sha256 is None and published is not None and actual != published:
        raise ValueError(
            f"{str(path)!r} has the name of a published checkpoint, but its SHA-256 is {actual} and the "
            f"published one is {published}; fetch it again, or pass --sha256 {actual} if it is another file."
        )
    result = folder / f"{path.stem}.safetensors"
    for made in (result, result.with_suffix(".json")):
        if made.exists():
            raise ValueError(f"{str(made)!r} exists already; name another folder or move it away.")
    head = load_weaver(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_weaver(head, result)
    if not same_numbers(head, load_weaver(result)):
        result.unlink()
        result.with_suffix(".json").unlink()
        raise ValueError(f"{str(result)!r} did not read back as it was written and has been removed.")
    origin = "the published file" if actual == published else "not a published file that is known here"
    count = sum(parameter.numel() for parameter in head.parameters())
    return [
        f"{path}: SHA-256 {actual} ({origin})",
        f"{result}: SHA-256 {_digest(result)}, {count} parameters in {head.dtype}, equal bit for bit",
    ]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 1 after one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="a .pth or .pt file, a folder with one, or repo[:file] on the hub")
    parser.add_argument("folder", type=Path, help="where the .safetensors and .json files go")
    parser.add_argument("--sha256", help="SHA-256 that the source must have")
    parser.add_argument("--revision", help="branch, tag or commit of the hub repository")
    args = parser.parse_args(argv)
    try:
        lines = convert(args.source, args.folder, args.sha256, args.revision)
    except ValueError as error:
        print(f"convert_weaver: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
