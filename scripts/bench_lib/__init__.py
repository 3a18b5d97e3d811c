# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmarks bench_kernels.py and bench_step.py."""
