"""Configs as architectures of Megatron: what is taken, and what is refused by name."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

from drivetrain import MegatronBert, MegatronGPT, MegatronT5  # noqa: E402
from drivetrain.strategies.megatron_models import architecture  # noqa: E402

PLAIN = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 33, "sequence_length": 8}


def test_fields_of_a_dict_go_where_they_belong():
    made = architecture({**PLAIN, "seq_length": 12, "sequence_length": 12, "positions": "rope", "tied": False})
    assert (made.kind, made.vocab_size, made.sequence_length) == ("gpt", 33, 12)
    assert (made.positions, made.tied) == ("rope", False)
    assert made.fields == {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    config = made.config(tensor_model_parallel_size=2)
    assert (config.num_layers, config.ffn_hidden_size, config.tensor_model_parallel_size) == (2, 64, 2)


@pytest.mark.parametrize("name, function", [("gelu", torch.nn.functional.gelu), ("silu", torch.nn.functional.silu)])
def test_activations_may_be_named(name, function):
    assert architecture({**PLAIN, "activation_func": name}).config().activation_func is function


@pytest.mark.parametrize("change, message", [
    ({"num_layrs": 3}, "TransformerConfig. Received: 'num_layrs'. Did you mean 'num_layers'"),
    ({"tensor_model_parallel_size": 2}, "Received: tensor_model_parallel_size=2, which the engine sets"),
    ({"recompute_granularity": "full"}, "Received: recompute_granularity='full', which the engine sets"),
    ({"multi_latent_attention": True}, "Received: multi_latent_attention=True"),
    ({"mtp_num_layers": 1}, "Received: mtp_num_layers=1"),
    ({"positions": "relative"}, "positions of T5 alone to be relative"),
])  # fmt: skip
def test_other_keys_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        architecture({**PLAIN, **change})


def test_missing_sizes_are_named():
    with pytest.raises(ValueError, match="Received: no num_layers, vocab_size"):
        architecture({name: value for name, value in PLAIN.items() if name not in ("num_layers", "vocab_size")})


def test_unknown_activations_and_kinds_are_refused():
    with pytest.raises(ValueError, match="Expected activation_func of gelu, .* Received: 'swish2'"):
        architecture({**PLAIN, "activation_func": "swish2"}).config()
    with pytest.raises(ValueError, match="Expected a kind of gpt, bert, t5. Received: kind='gtp'"):
        architecture(PLAIN, "gtp")


def test_a_field_of_the_model_and_the_engine_has_one_value():
    made = architecture({**PLAIN, "hidden_dropout": 0.1})
    assert made.config(hidden_dropout=0.1).hidden_dropout == 0.1
    with pytest.raises(ValueError, match="hidden_dropout=0.1 of the model and 0.2 of the engine"):
        made.config(hidden_dropout=0.2)


def test_the_vocabulary_is_padded_for_the_ranks():
    assert [architecture(PLAIN).padded_vocab_size(size) for size in (1, 2, 4)] == [33, 34, 36]
    assert architecture({**PLAIN, "vocab_multiple": 16}).padded_vocab_size(2) == 64


LLAMA = dict(vocab_size=33, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)


@pytest.mark.parametrize("family, change, name", [
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"hidden_act": "tanh"}, "hidden_act='tanh'"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters="),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 1e4,
                                   "high_freq_factor": 2.0, "original_max_position_embeddings": 64}},
     "rope_parameters="),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "layer_types="),
    ("mixtral", {"output_router_logits": True}, "output_router_logits=True"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("bert", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("bert", {"is_decoder": True}, "is_decoder=True"),
    ("t5", {}, "dropout_rate=0.1"),
    ("t5", {"dropout_rate": 0.0, "feed_forward_proj": "gated-tanh"}, "feed_forward_proj='tanh'"),
])  # fmt: skip
def test_what_megatron_does_not_compute_is_refused_by_its_key(family, change, name):
    with pytest.raises(ValueError, match="computes exactly. Received: ") as caught:
        architecture({"model_type": family, **change})
    assert f"Received: {name}" in str(caught.value)


def test_what_means_nothing_to_the_numbers_is_taken():
    made = architecture(transformers.LlamaConfig(**LLAMA, use_cache=False, pad_token_id=3, pretraining_tp=2))
    assert made.kind == "gpt" and made.fields["num_query_groups"] == 4 and made.rotary == {"rotary_base": 10000.0}


def test_other_families_and_things_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Expected a config of bert, gpt2, .* Received: model_type='gpt_neox'"):
        architecture(transformers.GPTNeoXConfig())
    with pytest.raises(ValueError, match="or a folder with config.json"):
        architecture(str(tmp_path))


def test_a_model_a_dict_and_a_folder_say_the_same(tmp_path):
    config = transformers.GPT2Config(vocab_size=33, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    config.save_pretrained(tmp_path)
    model = transformers.GPT2LMHeadModel(config)
    made = [architecture(one) for one in (config, model, {"model_type": "gpt2", "vocab_size": 33, "n_embd": 16,
                                                          "n_layer": 1, "n_head": 2, "n_positions": 8}, str(tmp_path))]
    assert all(one.fields == made[0].fields and one.vocab_size == 33 and one.tied for one in made)


def test_modules_know_nothing_outside_of_a_run():
    for kind in (MegatronGPT, MegatronBert, MegatronT5):
        with pytest.raises(RuntimeError, match=f"Expected {kind.__name__} in a run"):
            kind(PLAIN).state_of_transformers()


GPT, BERT, T5 = (architecture(config) for config in (
    PLAIN, {"model_type": "bert", "vocab_size": 33, "num_hidden_layers": 1, "max_position_embeddings": 8,
            "architectures": ["BertForPreTraining"]},
    {"model_type": "t5", "dropout_rate": 0.0, "decoder_start_token_id": 0},
))  # fmt: skip


def test_labels_of_transformers_move_to_where_they_are_predicted():
    batch = GPT.batch({"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[5, -100, 7, 8]])})
    assert batch.inputs["labels"].tolist() == [[0, 7, 8, 0]] and batch.mask.tolist() == [[False, True, True, False]]
    total, count = batch.loss(torch.tensor([[1.0, 2.0, 4.0, 8.0]]))
    assert (float(total), float(count)) == (6.0, 2.0)


def test_text_is_cut_into_tokens_and_labels():
    for data in (torch.tensor([[5, 6, 7, 8]]), {"text": torch.tensor([[5, 6, 7, 8]])}):
        batch = GPT.batch(data)
        assert batch.inputs["input_ids"].tolist() == [[5, 6, 7]] and batch.inputs["labels"].tolist() == [[6, 7, 8]]
        assert batch.inputs["position_ids"].tolist() == [[0, 1, 2]] and batch.inputs["attention_mask"] is None


def test_masks_of_padding_hide_padding_and_what_comes_later():
    ids = torch.ones(1, 3, dtype=torch.long)
    batch = GPT.batch({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1]])})
    hidden = batch.inputs["attention_mask"][0, 0].int().tolist()
    assert hidden == [[1, 1, 1], [1, 0, 1], [1, 0, 0]]
    assert "labels" not in batch.inputs and batch.mask is None


def test_long_samples_and_batches_without_tokens_are_refused():
    with pytest.raises(ValueError, match="Expected at most 8 tokens a sample. Received: 9"):
        GPT.batch({"input_ids": torch.ones(1, 9, dtype=torch.long)})
    with pytest.raises(ValueError, match=r"Expected a batch with input_ids. Received: \['ids'\]"):
        GPT.batch({"ids": torch.ones(1, 3)})
    with pytest.raises(ValueError, match="Expected labels or decoder_input_ids"):
        T5.batch({"input_ids": torch.ones(1, 3, dtype=torch.long)})


def test_the_next_sentence_counts_as_a_mean_over_sentences():
    batch = BERT.batch({"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[-100, 6]]),
                        "next_sentence_label": torch.tensor([1])})  # fmt: skip
    assert batch.inputs["tokentype_ids"].tolist() == [[0, 0]] and batch.inputs["attention_mask"].tolist() == [[1, 1]]
    total, count = batch.loss((torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0]])))
    assert float(total) == pytest.approx(3 + 0.6931472) and float(count) == 1


def test_t5_reads_its_labels_from_a_start_token_on():
    batch = T5.batch({"input_ids": torch.tensor([[5, 6, 0]]), "labels": torch.tensor([[7, 8, -100, 9]]),
                      "attention_mask": torch.tensor([[1, 1, 0]])})  # fmt: skip
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 7, 8, 0]]
    assert batch.inputs["encoder_attn_mask"][0, 0].tolist() == [[False, False, True]] * 3
    assert batch.inputs["encoder_decoder_attn_mask"].shape == (1, 1, 4, 3)
    assert batch.inputs["decoder_attn_mask"][0, 0, 1].tolist() == [False, False, True, True]
