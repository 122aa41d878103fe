"""Matrices of weights, and the fields of a configuration that give their sizes. No jax."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

# "linear": in a layer; "expert": in one of several experts; "head": onto the vocabulary;
# "tower": in an encoder of images or sounds; "other": embeddings and the rest, never quantised.
# "table": of n-grams, in fp8 with a scale for 32 elements wherever anything is quantised.
Role = Literal["linear", "expert", "head", "tower", "table", "other"]


WHOLE = 1

# Names of fields that may size a matrix.
SIZED = re.compile(r"(^|_)(size|dim|rank|width|embeddings|hidden|inner|ffn)s?$|^mova_num_experts$")
# Fields that match and size none, or one that is less than a thousandth of a model.
UNSIZED = frozenset(
    """
    attention_head_dim attention_hidden_size attention_window_size attn_res_block_size block_dim
    block_size
    candidate_block_size chunk_size classifier_proj_size dspark_block_size dspark_markov_rank
    engram_compressed_vocab_size engram_max_ngram_size engram_vocab_size gated_norm_rank
    group_norm_size head_dim index_block_size layer_group_size mamba_chunk_size
    max_position_embeddings max_window_size median_filter_width ngram_size org_vocab_size
    original_max_position_embeddings ple_conv_kernel_size qk_head_dim rel_extent rope_dim
    rotary_dim sliding_window_size text_hidden_size time_step_rank unpadded_vocab_size window_size
    """.split()
)


class Matrix(NamedTuple):
    """Weights of one shape.

    name: name of the module, as in a configuration's list of modules that are not quantised.
    outputs, inputs: shape of one matrix.
    role: its part in the model.
    count: number of such matrices, for example one for each expert.
    max_ranks: most tensor-parallel ranks among which it divides; `WHOLE`: each has all of it;
      None: any number. Of keys and values it is the number of KV heads, as each rank has one.
    """

    name: str
    outputs: int
    inputs: int
    role: Role = "linear"
    count: int = 1
    max_ranks: int | None = None

    @property
    def parameters(self) -> int:
        """Elements of all these matrices."""
        return self.outputs * self.inputs * self.count


# A matrix, and the layers beside which it lies: a pipeline stage with any of them has it.
Placed = tuple[Sequence[int], Matrix]


def feed_forward(
    name: str, hidden: int, width: int, *, gated: bool, role: Role = "linear", count: int = 1
) -> Iterable[Matrix]:
    """Yields the matrices of a feed-forward layer: into ``width``, with a gate or not, and back."""
    for matrix in ("gate_proj", "up_proj") if gated else ("up_proj",):
        yield Matrix(f"{name}.{matrix}", width, hidden, role, count)
    yield Matrix(f"{name}.down_proj", hidden, width, role, count)


# Names that a refusal shows, of several for the same.
USUAL = frozenset(
    """
    first_k_dense_replace intermediate_size moe_intermediate_size n_shared_experts
    num_attention_heads num_experts num_hidden_layers
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of a configuration, which have several names among families.

    model_type: the model type that errors name.
    values: field -> value.
    read: names of the fields that were asked for.
    """

    model_type: str
    values: Mapping[str, Any]
    read: set[str] = dataclasses.field(default_factory=set)

    def at_layer(self, layer: int) -> "Fields":
        """Returns the fields with those that ``per_layer_config`` changes for a layer."""
        changes = self.values.get("per_layer_config")
        for key, own in changes.items() if isinstance(changes, Mapping) else ():
            if str(key).isdecimal() and int(key) == layer:
                return dataclasses.replace(self, values={**self.values, **own})
        return self

    def unread_sizes(self) -> list[str]:
        """Returns the fields that may size a matrix, and that nothing has read."""
        known = self.read | UNSIZED
        return [
            name
            for name, value in self.values.items()
            if isinstance(value, (int, Sequence)) and name not in known and SIZED.search(name)
            if value not in (True, False, 0, 1, []) and not isinstance(value, str)
        ]

    def first(self, *names: str) -> Any:
        """Returns the first of the fields that is there and not null, or None."""
        self.read.update(names)
        given = (self.values[name] for name in names if self.values.get(name) is not None)
        return next(given, None)

    def listed(self, *names: str) -> Sequence[Any] | None:
        """Returns the first of the fields that is set if it is a list, else None."""
        value = self.first(*names)
        return value if isinstance(value, Sequence) and not isinstance(value, str) else None

    def number(
        self, *names: str, default: int | None = None, layer: int = 0, least: int = 0
    ) -> int:
        """Returns the first of the fields that is set, or the default: an int, ``least`` at least.

        A list holds a number for every layer.
        """
        value = self.first(*names)
        if (listed := self.listed(*names)) is not None and layer < len(listed):
            value = listed[layer]
        if value is None and default is not None:
            return default
        if all(name not in self.values for name in names):
            raise self.lacks(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{names[0]}={value!r} does not give the sizes of the weights of "
                f"model_type={self.model_type!r}: it must be an int of at least {least}"
            )
        return value

    def lacks(self, *names: str) -> ValueError:
        """Returns the error for a file with none of these fields."""
        known = next((name for name in names if name in USUAL), names[0])
        return ValueError(
            f"the configuration lacks {known!r}, which sizes the weights of "
            f"model_type={self.model_type!r}; add it, as the model has it"
        )

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.number("hidden_size", "n_embd", "d_model")

    @property
    def num_layers(self) -> int:
        """Layers of the language model."""
        # Nemotron-H may have no other count.
        kinds = self.listed("layers_block_type", "layer_types")
        default = None if kinds is None else len(kinds)
        return self.number(
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=default
        )
