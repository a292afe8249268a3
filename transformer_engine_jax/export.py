"""What jax.export needs to know to store functions of this library."""

from __future__ import annotations

import json

from jax import export

from transformer_engine_jax.handlers import HANDLERS
from transformer_engine_jax.ops.attention import SequenceDescriptor
from transformer_engine_jax.ops.casts import Quantized
from transformer_engine_jax.ops.main_grad import Accumulating
from transformer_engine_jax.quantized import AttentionState, GemmState, QuantizedTensor, QuantizerState


def export_checks() -> list[export.DisabledSafetyCheck]:
    """This library's handlers, for jax.export.export(f, platforms=["cpu", "cuda"], disabled_checks=te.export_checks()).

    JAX stores only calls of functions that their authors promise to keep. What is stored with ours runs under the same
    version of this library, on any platform it was exported for; here or on a machine that has that platform.

    Functions may take and return this library's types of arrays. JAX does not store Flax's boxes around parameters,
    which carry their logical axes: nn.unbox first. Nor does it store programs of a mesh whose axes are the compiler's,
    which hold a callback that says how our kernels are partitioned: export from explicit axes, or without a mesh.
    """
    targets = {target for handlers in HANDLERS.values() for target in handlers}
    return [export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]


for _type in (QuantizedTensor, AttentionState, GemmState, SequenceDescriptor, Accumulating):
    export.register_pytree_node_serialization(
        _type,
        serialized_name=f"transformer_engine_jax.{_type.__name__}",
        serialize_auxdata=lambda aux: json.dumps(aux).encode(),
        deserialize_auxdata=lambda stored: tuple(json.loads(stored)),
    )
for _type in (QuantizerState, Quantized):
    export.register_namedtuple_serialization(_type, serialized_name=f"transformer_engine_jax.{_type.__name__}")
