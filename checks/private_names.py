"""Why the plug-in touches each private name of another library, and what happens without it.

`vanilla_transformer/releases.py` refuses a release without a name that results depend on.
"""

_REFUSED = "Without it, importing the package ends with an error that names the supported releases."
_HOOKS = f"Whether a module may be computed without a call. {_REFUSED}"
_KERNELS = (
    "Which attention kernels run. Without it, attention is eager: slower, with equal results."
)

REASONS: dict[str, str] = {
    "*._is_hf_initialized": "Which weights a file held. Without it, they are reported as missing.",
    "GenerationMixin._reorder_cache": (
        "Beam search of Transformers need not copy the sources' keys. Without it, it copies them."
    ),
    "Module._backward_hooks": _HOOKS,
    "Module._backward_pre_hooks": _HOOKS,
    "Module._forward_hooks": _HOOKS,
    "Module._forward_pre_hooks": _HOOKS,
    "Module._version": "Whether a weight has changed since it was laid out; it is a tensor's.",
    "PreTrainedConfig._attn_implementation": (
        f"The attention kernel; Transformers' guide for new models has it. {_REFUSED}"
    ),
    "PreTrainedModel._auto_class": (
        "A subclass saves the code of this model. Without it, it saves its own file."
    ),
    "PreTrainedModel._can_compile_fullgraph": (
        "`generate` may compile a static cache's steps. Without it, they are not compiled."
    ),
    "PreTrainedModel._can_record_outputs": (
        f"Hidden states and attention weights that a call asks for. {_REFUSED}"
    ),
    "PreTrainedModel._init_weights": (
        f"Initial weights; Transformers' guide for new models has it. {_REFUSED}"
    ),
    "PreTrainedModel._keys_to_ignore_on_save": (
        "Tied weights are in no file. Without it, Trainer reports them as missing."
    ),
    "PreTrainedModel._no_split_modules": (
        "`device_map` splits no layer. Without it, it may split one, which is slower."
    ),
    "PreTrainedModel._supports_flash_attn": _KERNELS,
    "PreTrainedModel._supports_flex_attn": _KERNELS,
    "PreTrainedModel._supports_sdpa": _KERNELS,
    "PreTrainedModel._tied_weights_keys": (
        f"Which tables are one; Transformers' guide for new models has it. {_REFUSED}"
    ),
    "torch._C._functorch.peek_interpreter_stack": (
        "Whether `torch.func` transforms the call. Without it, the fast kernels run as always."
    ),
    "torch._dynamo.maybe_mark_dynamic": (
        "On a GPU, the loss is compiled once for all lengths. Without it, for each length."
    ),
    "torch.ops.mkldnn._linear_pointwise": (
        "Faster products of laid out weights on a CPU. Without it, the usual ones."
    ),
    "torch.ops.mkldnn._reorder_linear_weight": (
        "Lays weights out for a CPU. Without it, they stay as they are."
    ),
}
