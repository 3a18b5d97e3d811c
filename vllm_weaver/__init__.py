# SPDX-License-Identifier: Apache-2.0
"""Tree speculative decoding for vLLM: a DFlash draft, a Weaver head, hybrid targets."""

__version__ = "0.1.0"
