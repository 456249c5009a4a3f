"""The dtypes of tensors by torch's names, for code that imports no torch."""

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""The bytes of an element."""
SAFETENSORS_NAMES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "int64": "I64", "int32": "I32", "int8": "I8",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The names in the headers of safetensors files."""
