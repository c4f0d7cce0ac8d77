"""Quantised linear layers: stand-ins of the shapes that bitsandbytes gives them, and its own where it is installed."""

import functools
import importlib.util

import torch
from torch import nn


class Params4bit(nn.Parameter):
    """Two codes in a byte, in one column; the scales of blocks hang on the parameter, as bitsandbytes' QuantState."""

    BLOCK = 16

    def __new__(cls, data, requires_grad=False, quant_state=None, quant_storage=torch.uint8):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.quant_state, self.quant_storage = quant_state, quant_storage
        return self

    @classmethod
    def of(cls, weight, quant_storage=torch.uint8):
        blocks = weight.detach().reshape(-1, cls.BLOCK)
        absmax = blocks.abs().amax(1, keepdim=True).clamp(min=1e-8)
        codes = (blocks / absmax * 7 + 8).round().to(torch.uint8).view(-1, 2)
        packed = (codes[:, 0] << 4 | codes[:, 1]).view(quant_storage)
        return cls(packed.view(-1, 1), quant_state=(absmax, weight.shape), quant_storage=quant_storage)

    def dequantised(self, dtype):
        absmax, shape = self.quant_state
        codes = self.data.view(torch.uint8).view(-1, 1)
        values = torch.cat([codes >> 4, codes & 15], 1).to(dtype).view(-1, self.BLOCK) - 8
        return (values * (absmax.to(dtype) / 7)).view(shape)


class Linear4bit(nn.Linear):
    def __init__(self, linear, quant_storage=torch.uint8):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = Params4bit.of(linear.weight, quant_storage)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.dequantised(x.dtype))


class Int8Params(nn.Parameter):
    """Codes of one byte, which the attribute CB has too until the first call of the layer."""

    def __new__(cls, data, requires_grad=False, CB=None, SCB=None):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.CB, self.SCB = CB, SCB
        return self

    @classmethod
    def of(cls, weight):
        scale = weight.detach().abs().amax(1)
        codes = (weight.detach() / scale[:, None] * 127).round().to(torch.int8)
        return cls(codes, CB=codes, SCB=scale)

    def to(self, *args):  # as narrow as that of bitsandbytes
        return Int8Params(super().to(*args), CB=self.CB, SCB=self.SCB)


class _Tensors(torch.Tensor):
    """Tensors in attributes, in one tensor without memory of its own, as torchao's base class has it."""

    @staticmethod
    def __new__(cls, *parts, dtype=torch.float32):
        shape = parts[0].shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts[0].device)

    def __init__(self, *parts, dtype=torch.float32):
        for name, part in zip(self.NAMES, parts, strict=True):
            setattr(self, name, part)

    def __tensor_flatten__(self):
        return list(self.NAMES), self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner, dtype, size, stride):
        return cls(*(inner[name] for name in cls.NAMES), dtype=dtype)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            own = args[0]
            return type(own)(*(func(getattr(own, name)) for name in own.NAMES), dtype=own.dtype)
        values = [arg.dequantize() if isinstance(arg, _Tensors) else arg for arg in args]
        return func(*values, **(kwargs or {}))


class ScaledRows(_Tensors):
    """One scale for each row: 16-bit floats as they lie in memory, transposed."""

    NAMES = ("bits",)

    def dequantize(self):
        return self.bits.T.float()


class TensorOfTensors(_Tensors):
    """Codes of 8 bit, a sum of each row, and scales that are such a tensor themselves."""

    NAMES = ("codes", "sums", "scale")

    @classmethod
    def of(cls, weight):
        scale = weight.detach().abs().amax(1, keepdim=True).half()
        codes = (weight.detach() / scale.float() * 127).round().to(torch.int8)
        return cls(codes, codes.sum(1, dtype=torch.int32), ScaledRows(scale.T), dtype=weight.dtype)

    def dequantize(self):
        values = self.codes.to(self.dtype)
        assert torch.equal(values.sum(1).int(), self.sums), "codes of something else"
        return values * (self.scale.dequantize() / 127)


def linear_of_tensors(linear):
    weight = TensorOfTensors.of(linear.weight)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


class _State:
    CB = SCB = None


class Linear8bitLt(nn.Linear):
    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.state = Int8Params.of(linear.weight), _State()

    def forward(self, x):
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        out = _Matmul8bit.apply(x, self.state)
        self.weight.data = self.state.CB
        return out


class _Matmul8bit(torch.autograd.Function):
    """Reads the layer's state in backward too, and saves nothing."""

    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        return x @ _Matmul8bit.weight(state, x.dtype).T

    @staticmethod
    def backward(ctx, grad):
        return grad @ _Matmul8bit.weight(ctx.state, grad.dtype), None

    @staticmethod
    def weight(state, dtype):
        return state.CB.to(dtype, copy=True) * (state.SCB.to(dtype)[:, None] / 127)


def _bitsandbytes_4bit(linear):
    import bitsandbytes

    sizes = linear.in_features, linear.out_features
    layer = bitsandbytes.nn.Linear4bit(*sizes, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer)
    layer.weight = weight
    layer.support_avx512bf16_for_cpu = False  # what it does in evaluation needs larger layers than these
    return layer.to("cpu")


def _bitsandbytes_8bit(linear):
    import bitsandbytes

    sizes = linear.in_features, linear.out_features
    layer = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=0.0)
    layer.weight = bitsandbytes.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    return layer.to("cpu")


def _torchao(config, linear):
    import torchao.quantization

    whole = nn.Sequential(linear)
    torchao.quantization.quantize_(whole, getattr(torchao.quantization, config)())
    return whole[0]


def linear_4bit_in_bf16(linear):
    return Linear4bit(linear, torch.bfloat16)


LAYERS = {
    "4bit": Linear4bit,
    "8bit": Linear8bitLt,
    "4bit_in_bf16": linear_4bit_in_bf16,
    "tensors": linear_of_tensors,
}
# By package.
LIBRARIES = {
    "bitsandbytes": {"bitsandbytes_4bit": _bitsandbytes_4bit, "bitsandbytes_8bit": _bitsandbytes_8bit},
    "torchao": {
        f"torchao_{name}": functools.partial(_torchao, config)
        for name, config in (
            ("int8", "Int8WeightOnlyConfig"),
            ("float8", "Float8WeightOnlyConfig"),
            ("intx", "IntxWeightOnlyConfig"),
        )
    },
}
LIBRARY = {kind: make for kinds in LIBRARIES.values() for kind, make in kinds.items()}


def lacks(package):
    return package is not None and importlib.util.find_spec(package) is None


def is_missing(kind):
    return any(kind in kinds and lacks(package) for package, kinds in LIBRARIES.items())


def stored(param):
    """The bytes that a parameter consists of."""
    names = param.__tensor_flatten__()[0] if hasattr(param, "__tensor_flatten__") else ()
    parts = [part for name in names for part in stored(getattr(param, name))]
    return parts if names else [param.detach().contiguous().view(-1).view(torch.uint8)]


def quantise(model, kind):
    """Freeze a decoder model, and quantise the linear layers of its blocks."""
    model.requires_grad_(False)
    make = (LAYERS | LIBRARY)[kind]
    for layer in model.model.layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, make(child))
    return model
