"""Panics of tokenizers."""


def is_panic(error: BaseException) -> bool:
    """Whether a tokenizer's Rust code has panicked, as at an endless search of an expression.

    Its error is no `Exception`, and cannot be imported.
    """
    return type(error).__name__ == "PanicException"
