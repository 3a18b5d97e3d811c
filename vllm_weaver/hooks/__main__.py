# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_weaver.hooks`: fingerprints of the installed vLLM beside the listed ones."""

from vllm_weaver.hooks import HOOKS, base


def main() -> int:
    """Print one line a hook; exit status 1 if any fingerprint differs."""
    differ = 0
    print(f"vLLM {base.vllm_version()} (hooks written for {base.SUPPORTED_VLLM})")
    for hook in HOOKS:
        found = base.fingerprint(hook.source or hook.target)
        differ += found != hook.fingerprint
        print(
            f"{'ok     ' if found == hook.fingerprint else 'CHANGED'} {hook.name:24} "
            f"listed {hook.fingerprint or '-':16} found {found or '-':16} {hook.source or hook.target}"
        )
    return int(differ > 0)


if __name__ == "__main__":
    raise SystemExit(main())
