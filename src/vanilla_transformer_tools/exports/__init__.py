"""Models of ours for other software: CTranslate2, ONNX Runtime, and classes of Transformers."""
