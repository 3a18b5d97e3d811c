# SPDX-License-Identifier: Apache-2.0
"""Parts of `scripts/train_demo.py`: corpus and tokenizer, target, DFlash draft, Weaver head, evaluation."""
