# SPDX-License-Identifier: Apache-2.0
"""Parts of scripts/quantize_draft.py: packing weights, and capturing what reaches them."""
