"""A micro-batch as Megatron's models take it, of what loaders give.

GPT takes any of these; all tensors are (samples, tokens) unless said otherwise:

- Megatron's own: `tokens`, `labels`, `loss_mask`, `position_ids`, and `attention_mask` (samples, 1, tokens, tokens)
  that is True where nothing is seen;
- Hugging Face's: `input_ids`, `labels` that are not shifted, with -100 where nothing is to be predicted, and an
  `attention_mask` that is 1 for tokens and 0 for padding;
- `text`, or a tensor alone: tokens with one more at the end, each of which is to be predicted from those before it.

BERT and T5 take Hugging Face's names, and Megatron's of their data sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

IGNORED = -100  # Hugging Face's label of tokens that are not to be predicted


@dataclasses.dataclass
class Batch:
    """Arguments of the model's forward, and where its losses count.

    Args:
        inputs: keyword arguments of the chunk's forward, labels among them.
        mask: (samples, tokens), 1 where a loss counts; None without labels.
        binary: BERT's labels of the next sentence.
    """

    inputs: dict[str, Any]
    mask: torch.Tensor | None = None
    binary: torch.Tensor | None = None

    def run(self, chunk: Any) -> Any:
        """Returns what a chunk gives: hidden states, or on the last stage a loss for each token, or logits."""
        return chunk(**self.inputs)

    def loss(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of the losses that count, and their number.

        The loss of BERT's next sentences is a mean over sentences, and comes into the sum as often as tokens count.
        """
        losses, binary = output if isinstance(output, tuple) else (output, None)
        assert self.mask is not None, "a loss needs labels"
        mask = self.mask.to(losses.dtype)
        total, count = (losses * mask).sum(), mask.sum()
        if binary is not None and self.binary is not None:
            total = total + torch.nn.functional.cross_entropy(binary.float(), self.binary.view(-1)) * count
        return total, count


def gpt_batch(data: Any, architecture: Any) -> Batch:
    """Returns GPT's micro-batch.

    Raises:
        ValueError: there are no tokens in it, or more than the model has positions for.
    """
    if isinstance(data, torch.Tensor):
        data = {"text": data}
    if "text" in data:
        text = data["text"].long()
        data = {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
    if "tokens" in data:
        tokens, labels, mask = data["tokens"], data.get("labels"), data.get("loss_mask")
        attention = data.get("attention_mask")
    else:
        tokens, attention = _tokens(data, "input_ids"), _causal(data.get("attention_mask"))
        labels, mask = _shifted(data.get("labels")), None
    _check_length(tokens, architecture)
    positions = data.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    labels, mask = _counted(labels, mask)
    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": attention}
    return Batch({**inputs, "labels": labels} if labels is not None else inputs, mask)


def bert_batch(data: Mapping[str, Any], architecture: Any) -> Batch:
    """Returns BERT's micro-batch: masked tokens, and where there is a head for it the next sentence."""
    if "text" in data:  # of Megatron's BERTMaskedWordPieceDataset
        tokens, attention, types = data["text"].long(), data["padding_mask"].long(), data["types"].long()
        labels, mask, binary = data["labels"].long(), data["loss_mask"], data["is_random"].long()
    else:
        tokens, types = _tokens(data, "input_ids"), data.get("token_type_ids")
        attention, mask = data.get("attention_mask"), None
        labels, binary = data.get("labels"), data.get("next_sentence_label")
    _check_length(tokens, architecture)
    attention = torch.ones_like(tokens) if attention is None else attention
    if types is None and architecture.token_types:
        types = torch.zeros_like(tokens)
    labels, mask = _counted(labels, mask)
    inputs = {"input_ids": tokens, "attention_mask": attention, "tokentype_ids": types, "lm_labels": labels}
    return Batch(inputs, mask, binary if architecture.binary_head else None)


def t5_batch(data: Mapping[str, Any], architecture: Any) -> Batch:
    """Returns T5's micro-batch: tokens of both sides, and masks that are True where nothing is seen."""
    if "text_enc" in data:  # of Megatron's T5MaskedWordPieceDataset
        tokens, targets = data["text_enc"].long(), data["text_dec"].long()
        labels, mask = data["labels"].long(), data["loss_mask"]
        enc = tokens.new_ones(tokens.shape) if "enc_mask" not in data else data["enc_mask"][:, 0]
    else:
        tokens, mask = _tokens(data, "input_ids"), None
        labels, enc = data.get("labels"), data.get("attention_mask")
        targets = data.get("decoder_input_ids")
        if targets is None:
            targets = _right_shifted(labels, architecture)
    _check_length(tokens, architecture)
    _check_length(targets, architecture)
    enc = torch.ones_like(tokens) if enc is None else enc
    labels, mask = _counted(labels, mask)
    hidden = ~enc.bool()
    causal = torch.ones(targets.shape[1], targets.shape[1], dtype=torch.bool, device=targets.device).triu(1)
    inputs = {
        "encoder_input_ids": tokens, "decoder_input_ids": targets, "lm_labels": labels,
        "encoder_attn_mask": hidden[:, None, None, :].expand(-1, 1, tokens.shape[1], -1),
        "decoder_attn_mask": causal[None, None].expand(len(targets), 1, -1, -1),
        "encoder_decoder_attn_mask": hidden[:, None, None, :].expand(-1, 1, targets.shape[1], -1),
    }  # fmt: skip
    return Batch(inputs, mask)


def _tokens(data: Mapping[str, Any], name: str) -> torch.Tensor:
    if not isinstance(data, Mapping) or name not in data:
        shown = sorted(data) if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"Expected a batch with {name}. Received: {shown}. Return dicts from your data set.")
    tokens: torch.Tensor = data[name]
    return tokens


def _check_length(tokens: torch.Tensor, architecture: Any) -> None:
    if tokens.shape[1] > architecture.sequence_length:
        raise ValueError(
            f"Expected at most {architecture.sequence_length} tokens a sample. Received: {tokens.shape[1]}. Make the "
            "model with a longer sequence_length, or cut the samples."
        )


def _counted(labels: Any, mask: Any) -> tuple[Any, Any]:
    """Labels that Megatron's cross entropy can look up, and where they count."""
    if labels is None:
        return None, None
    seen = labels != IGNORED
    return labels.masked_fill(~seen, 0).contiguous(), seen if mask is None else mask * seen


def _shifted(labels: Any) -> Any:
    """Hugging Face's labels, each in the place from which it is predicted."""
    if labels is None:
        return None
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)


def _causal(attention: Any) -> Any:
    """Hugging Face's mask of padding with what comes later: True where nothing is seen; None without padding's."""
    if attention is None or attention.dim() != 2:
        return attention
    later = torch.ones(attention.shape[1], attention.shape[1], dtype=torch.bool, device=attention.device).triu(1)
    return later[None, None] | ~attention.bool()[:, None, None, :]


def _right_shifted(labels: Any, architecture: Any) -> torch.Tensor:
    """What T5's decoder reads to predict labels: a start token, then all labels but the last."""
    if labels is None:
        raise ValueError("Expected labels or decoder_input_ids. Received: neither. T5's decoder needs one of them.")
    config = architecture.hugging_face
    start = getattr(config, "decoder_start_token_id", None) or 0
    padding = getattr(config, "pad_token_id", None) or 0
    moved = torch.cat([labels.new_full((len(labels), 1), start), labels[:, :-1]], dim=1)
    return moved.masked_fill(moved == IGNORED, padding)
