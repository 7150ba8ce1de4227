"""Quantized safetensors: the tensors that each quantization method keeps, read into the neutral `QuantTensor`."""
