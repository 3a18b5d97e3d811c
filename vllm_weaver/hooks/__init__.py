# SPDX-License-Identifier: Apache-2.0
"""Every hook of vllm_weaver, on one page. Only what is listed here changes vLLM.

Config hooks are applied by the plugin in every process and act only on a config that asks for `dflash_tfm`.
Engine hooks are applied before such a config is built (their targets are models, too heavy to import for
everyone), runner hooks in a worker process when it gets such a config; a process may later build a plain
engine, so each replacement falls through to the original for a config without our settings. Draft hooks mend
upstream's DFlash2 in a worker that has such a draft, whether `dflash_tfm` is asked for or not. `python -m
vllm_weaver.hooks` prints the fingerprints.
"""

from vllm_weaver.hooks.base import Hook

HOOKS: tuple[Hook, ...] = (
    Hook(
        name="speculative-config",
        target="vllm.engine.arg_utils:SpeculativeConfig",
        source="vllm.config.speculative:SpeculativeConfig",
        make="vllm_weaver.hooks.config_side:speculative_config",
        phase="config",
        kind="subclass-rebind",
        reason="accept method dflash_tfm and its keys; upstream's method and keys are closed lists",
        removal="vLLM lets a plugin register a speculative method with its own config",
        fingerprint="c9988d78f030eb5a",
    ),
    Hook(
        name="engine-config",
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        make="vllm_weaver.hooks.config_side:create_engine_config",
        phase="config",
        kind="wrap",
        reason="check the whole configuration before weights are loaded, and report a mistake as one line; "
        "add sizes of CUDA graphs that cover every sequence's tree",
        removal="vLLM lets a speculative config validate the VllmConfig it becomes part of, and captures "
        "more than 512 rows for wide drafts",
        fingerprint="16df91fd0a48af52",
    ),
    Hook(
        name="lookahead-slots",
        target="vllm.config.vllm:VllmConfig.num_lookahead_tokens",
        make="vllm_weaver.hooks.config_side:num_lookahead_tokens",
        phase="config",
        kind="wrap",
        reason="the draft writes depth + 1 slots past the accepted path, whatever the tree budget",
        removal="vLLM asks the speculative config for its look-ahead",
        fingerprint="25b927c6a43ae929",
    ),
    Hook(
        name="sampling-params",
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        make="vllm_weaver.hooks.config_side:validate_spec_decode",
        phase="config",
        kind="wrap",
        reason="min_p and logit_bias work on trees: every node's row is sampled as without speculation",
        removal="vLLM accepts them with speculative decoding",
        fingerprint="2d12ade14c28782a",
    ),
    Hook(
        name="worker-start",
        target="vllm.v1.worker.worker_base:WorkerWrapperBase.init_device",
        make="vllm_weaver.hooks.config_side:init_device",
        phase="config",
        kind="wrap",
        reason="apply the runner hooks in a worker that has our settings, before it builds its model runner",
        removal="no runner hook is left",
        fingerprint="04080009a2ca128b",
    ),
    Hook(
        name="speculator",
        target="vllm.v1.worker.gpu.model_runner:init_speculator",
        source="vllm.v1.worker.gpu.spec_decode:init_speculator",
        make="vllm_weaver.hooks.runner_side:init_speculator",
        phase="runner",
        kind="subclass-rebind",
        reason="DFlashTfmSpeculator, a DFlashSpeculator that turns the block's marginals into a tree",
        removal="vLLM lets a plugin register a speculator",
        fingerprint="4ff1d34ea212bf08",
    ),
    Hook(
        name="model-state",
        target="vllm.v1.worker.gpu.model_runner:init_model_state",
        source="vllm.v1.worker.gpu.model_states:init_model_state",
        make="vllm_weaver.hooks.runner_side:init_model_state",
        phase="runner",
        kind="subclass-rebind",
        reason="tree positions, masks, tree attention and GDN in the target's layers, walk and commit",
        removal="vLLM lets a plugin choose the model state",
        fingerprint="e7558d857194ad71",
    ),
    Hook(
        name="mamba-slots",
        target="vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec",
        make="vllm_weaver.hooks.runner_side:mamba_kv_cache_spec",
        phase="runner",
        kind="wrap",
        reason="one recurrent state slot a request; upstream reserves one more for each draft token",
        removal="a speculative method can say how many state slots it needs",
        fingerprint="f31f5d0fc2fa8905",
    ),
    Hook(
        name="state-shape-text",
        target="vllm.model_executor.models.qwen3_5:Qwen3_5ForCausalLMBase.get_mamba_state_shape_from_config",
        make="vllm_weaver.hooks.runner_side:mamba_state_shape",
        phase="engine",
        kind="wrap",
        reason="pages sized for a convolution state of plain width; upstream widens it by the drafts",
        removal="a speculative method can say how wide the convolution state is",
        fingerprint="51ccf9c7c879a05f",
    ),
    Hook(
        name="state-shape-multimodal",
        target="vllm.model_executor.models.qwen3_5:Qwen3_5ForConditionalGeneration.get_mamba_state_shape_from_config",
        make="vllm_weaver.hooks.runner_side:mamba_state_shape",
        phase="engine",
        kind="wrap",
        reason="as state-shape-text, for the wrapper class of the released checkpoints",
        removal="as state-shape-text",
        fingerprint="51ccf9c7c879a05f",
    ),
    Hook(
        name="gdn-core-cpu",
        target="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
        make="vllm_weaver.hooks.runner_side:gdn_core_cpu",
        phase="runner",
        kind="wrap",
        reason="tree rows of a Gated DeltaNet layer on the CPU",
        removal="vLLM's GDN layer lets a model state bring its verify",
        fingerprint="e35d1d4f3c706ec8",
    ),
    Hook(
        name="gdn-core-cuda",
        target="vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core",
        make="vllm_weaver.hooks.runner_side:gdn_core_cuda",
        phase="runner",
        kind="wrap",
        reason="tree rows of a Gated DeltaNet layer on a GPU",
        removal="vLLM's GDN layer lets a model state bring its verify",
        fingerprint="f36199f223e3916c",
    ),
    Hook(
        name="quantization-producer",
        target="vllm.transformers_utils.model_arch_config_convertor:"
        "ModelArchConfigConvertorBase._normalize_quantization_config",
        make="vllm_weaver.hooks.draft_side:normalize_quantization_config",
        phase="config",
        kind="wrap",
        reason="some published quantized drafts have a plain string as `producer`, which crashes upstream",
        removal="vLLM accepts a string there",
        fingerprint="dd1ee6ba0c7c4778",
    ),
    Hook(
        name="draft-quantization",
        target="vllm.model_executor.models.qwen3_dflash:get_draft_quant_config",
        source="vllm.model_executor.models.utils:get_draft_quant_config",
        make="vllm_weaver.hooks.draft_side:draft_quant_config",
        phase="runner",
        kind="wrap",
        reason="ignore lists and layer maps of a draft count its layers from 0 and name unfused modules; "
        "vLLM matches them against the fused modules of layers that follow the target's",
        removal="vLLM maps the names of every quantization method for drafts",
        fingerprint="db291be91007f232",
    ),
    Hook(
        name="dflash2-walk",
        target="vllm.v1.worker.gpu.spec_decode.dflash2.speculator:CandidateSampler.sample",
        make="vllm_weaver.hooks.draft_side:walk",
        phase="draft",
        kind="wrap",
        reason="a row of NaN scores makes the walk return ids outside the candidates if top_k is not a "
        "power of two; at tp=1 the target's embedding reads past its end with them",
        removal="_selector_walk_kernel clamps the index it found",
        fingerprint="82df79da38eaa887",
    ),
    Hook(
        name="dflash2-candidates",
        target="vllm.model_executor.models.qwen3_dflash2:DFlash2Qwen3ForCausalLM.compute_candidates",
        make="vllm_weaver.hooks.draft_side:candidates",
        phase="draft",
        kind="wrap",
        reason="a head that yields NaN has no defined candidates",
        removal="LogitsProcessor.get_top_k_tokens returns ids in the vocabulary for every row",
        fingerprint="cf043f5e71853959",
    ),
)
