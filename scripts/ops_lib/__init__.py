# SPDX-License-Identifier: Apache-2.0
"""What the scripts of operation share: serve profiles, the client of a running server, checks, datasets."""
