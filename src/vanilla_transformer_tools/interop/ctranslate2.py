"""Weights for CTranslate2: importing this module lets its `TransformersConverter` convert ours.

```python
import vanilla_transformer_tools.interop.ctranslate2
from ctranslate2.converters import TransformersConverter

TransformersConverter("runs/de-en").convert("runs/de-en-ct2", quantization="int8")
```

`vanilla_transformer_tools.interop.export` converts too, and compares the translations of both.
"""

from vanilla_transformer_tools.translation.ctranslate2_conversion import (
    VanillaTransformerLoader,
    convert,
)

__all__ = ["VanillaTransformerLoader", "convert"]
