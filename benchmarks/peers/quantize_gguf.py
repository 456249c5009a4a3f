"""A GGUF file in F32 in a format that only llama.cpp itself can write: ``quantize_gguf.py F32.gguf FILE Q4_K_M``, in llama.cpp's environment."""

import ctypes
import sys

import llama_cpp as C

settings = C.llama_model_quantize_default_params()
settings.ftype, settings.nthread = getattr(C, f"LLAMA_FTYPE_MOSTLY_{sys.argv[3]}"), 2
if C.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(settings)):
    sys.exit(f"llama.cpp cannot quantize {sys.argv[1]} to {sys.argv[3]}")
