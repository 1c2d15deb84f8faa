"""Random models and adapters for tests/peft_diff.py, as JSON can hold them.

A case has the arguments of a transformers config ("model"), changes of the config.json that
transformers saves ("edits"), the arguments of PEFT's LoraConfig ("adapter") and token ids.
"""

import random

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GATE_UP = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
PARTS = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "glm": GATE_UP,
    "glm4": GATE_UP,
    "granitemoehybrid": ["q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"],
    "arcee": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3",
            "smollm3", "olmo2", "olmo3", "granite", "granitemoehybrid", "glm", "glm4",
            "ministral3", "exaone4", "seed_oss", "arcee", "cohere2"]
# Families whose config has a head_dim of its own.
HEAD_DIM = ["llama", "mistral", "qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
            "ministral3", "seed_oss", "arcee"]
PER_KIND = ["gemma3_text", "olmo3"]  # one set of rotary parameters for each kind of layer


def chance(r, probability):
    return r.random() < probability


def rope(r, limit, kinds=("default", "linear", "llama3", "yarn"), weights=(6, 1, 2, 2)):
    kind = r.choices(kinds, weights)[0]
    out = {"rope_type": kind, "rope_theta": r.choice([1e4, 5e5, 1e6, 12345.0])}
    if kind in ("linear", "llama3", "yarn"):
        out["factor"] = r.choice([2.0, 4.0, 8.0])
    if kind == "llama3":
        out["low_freq_factor"] = 1.0
        out["high_freq_factor"] = 4.0
    if kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = limit // 2
    if kind == "yarn":
        for key, values in (("beta_fast", [32.0, 16.0]), ("beta_slow", [1.0, 2.0]),
                            ("attention_factor", [1.25]), ("truncate", [False])):
            if chance(r, 0.25):
                out[key] = r.choice(values)
        if chance(r, 0.25):
            out["mscale"] = 1.0
            out["mscale_all_dim"] = r.choice([0.5, 1.0])
    return out


def layer_types(r, c):
    return [r.choice(["sliding_attention", "full_attention"])
            for _ in range(c["num_hidden_layers"])]


def add_windows(r, c):
    """Families with a pattern of windows: as a list, or as the class makes it."""
    c["sliding_window"] = r.choice([3, 6, 4096])
    if chance(r, 0.5):
        c["layer_types"] = layer_types(r, c)


def add_qwen(r, c):
    if chance(r, 0.3):
        c["use_sliding_window"] = True
        c["sliding_window"] = r.choice([3, 6])
        c["max_window_layers"] = r.randint(0, c["num_hidden_layers"])
    if c["family"] == "qwen3" and chance(r, 0.04):
        c["attention_bias"] = True


def add_llama(r, c):
    c["attention_bias"] = chance(r, 0.2)
    c["mlp_bias"] = chance(r, 0.2)


def add_mistral(r, c):
    c["sliding_window"] = r.choice([None, 3, 7, 4096])


def add_gemma(r, c):
    c["attention_bias"] = chance(r, 0.2)
    if c["family"] == "gemma":
        return
    c["query_pre_attn_scalar"] = r.choice([16, 64, 256])
    c["final_logit_softcapping"] = r.choice([None, 5.0, 30.0])
    if c["family"] == "gemma2":
        c["attn_logit_softcapping"] = r.choice([None, 2.0, 50.0])
    add_windows(r, c)


def add_phi3(r, c):
    head = c["hidden_size"] // c["num_attention_heads"]
    partial = r.choice([1.0, 0.5, 0.75])
    rotated = int(head * partial) // 2
    c["sliding_window"] = r.choice([None, 3, 7])
    c["original_max_position_embeddings"] = r.choice([8, 16, c["max_position_embeddings"]])
    rope = {"rope_type": "default", "rope_theta": r.choice([1e4, 2.5e5]),
            "partial_rotary_factor": partial}
    if chance(r, 0.5):
        rope["rope_type"] = "longrope"
        rope["short_factor"] = [1.0 + r.random() for _ in range(rotated)]
        rope["long_factor"] = [1.0 + 5.0 * r.random() for _ in range(rotated)]
        rope["original_max_position_embeddings"] = c["original_max_position_embeddings"]
    c["rope_parameters"] = rope


def add_smollm3(r, c):
    add_llama(r, c)
    if chance(r, 0.5):
        c["no_rope_layers"] = [r.randint(0, 1) for _ in range(c["num_hidden_layers"])]
    else:
        c["no_rope_layer_interval"] = r.choice([1, 2, 4])
    if chance(r, 0.3):
        c["use_sliding_window"] = True
        c["sliding_window"] = r.choice([3, 6])


def add_olmo(r, c):
    c["attention_bias"] = chance(r, 0.2)
    if c["family"] == "olmo3":
        add_windows(r, c)


def add_granite(r, c):
    c["attention_bias"] = chance(r, 0.2)
    c["embedding_multiplier"] = r.choice([1.0, 12.0])
    c["residual_multiplier"] = r.choice([1.0, 0.22])
    c["attention_multiplier"] = r.choice([1.0, 0.015625, 0.25])
    c["logits_scaling"] = r.choice([1.0, 8.0])
    if c["family"] == "granite":
        c["mlp_bias"] = chance(r, 0.2)
        return
    c["num_local_experts"] = 0
    c["shared_intermediate_size"] = c.pop("intermediate_size")
    c["layer_types"] = ["full_attention"] * c["num_hidden_layers"]
    c["position_embedding_type"] = r.choice([None, "rope"])
    c["mamba_n_heads"] = 2
    c["rope_parameters"] = rope(r, c["max_position_embeddings"])


def add_glm(r, c):
    c["attention_bias"] = chance(r, 0.7)
    c["rope_parameters"]["partial_rotary_factor"] = r.choice([0.5, 0.25, 1.0])


def add_ministral3(r, c):
    c["sliding_window"] = r.choice([None, None, 5])
    c["rope_parameters"] = rope(r, c["max_position_embeddings"], ("default", "yarn"), (1, 3))
    c["rope_parameters"]["original_max_position_embeddings"] = r.choice([4, 16])
    c["rope_parameters"]["llama_4_scaling_beta"] = r.choice([0.1, 0.3])


def add_exaone4(r, c):
    c["sliding_window"] = r.choice([None, 3, 6])
    if c["sliding_window"] is None:
        c["layer_types"] = ["full_attention"] * c["num_hidden_layers"]
    elif chance(r, 0.5):
        c["layer_types"] = layer_types(r, c)
    else:
        c["sliding_window_pattern"] = r.choice([1, 2, 4])


def add_seed_oss(r, c):
    c["attention_bias"] = chance(r, 0.7)
    c["attention_out_bias"] = chance(r, 0.3)
    c["mlp_bias"] = chance(r, 0.3)


def add_arcee(r, c):
    c["attention_bias"] = chance(r, 0.3)
    c["mlp_bias"] = chance(r, 0.3)


def add_cohere2(r, c):
    c["attention_bias"] = chance(r, 0.3)
    c["sliding_window"] = r.choice([3, 6])
    c["layer_types"] = layer_types(r, c)
    c["logit_scale"] = r.choice([0.0625, 0.3, 1.0])
    c["layer_norm_eps"] = r.choice([1e-5, 1e-2])


ADD = {
    "llama": add_llama, "mistral": add_mistral, "qwen2": add_qwen, "qwen3": add_qwen,
    "gemma": add_gemma, "gemma2": add_gemma, "gemma3_text": add_gemma, "phi3": add_phi3,
    "smollm3": add_smollm3, "olmo2": add_olmo, "olmo3": add_olmo, "granite": add_granite,
    "granitemoehybrid": add_granite, "glm": add_glm, "glm4": add_glm,
    "ministral3": add_ministral3, "exaone4": add_exaone4, "seed_oss": add_seed_oss,
    "arcee": add_arcee, "cohere2": add_cohere2,
}


def random_model(r, family=None):
    """The arguments of a transformers config."""
    family = family or r.choice(FAMILIES)
    kv = r.choice([1, 2, 3])
    heads = kv * r.choice([1, 2, 3])
    head_dim = r.choice([16, 32, 64])
    hidden = heads * head_dim
    limit = r.choice([64, 128, 500])
    c = {
        "family": family,
        "vocab_size": r.randint(40, 300),
        "intermediate_size": r.choice([32, 48, 96, 160]),
        "num_hidden_layers": r.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": limit,
        "rms_norm_eps": r.choice([1e-5, 1e-6, 3e-4]),
        "tie_word_embeddings": chance(r, 0.5),
        "rope_parameters": rope(r, limit),
        "dtype": r.choice(["float32", "bfloat16", "float16"]),
        "pad_token_id": None,
        "bos_token_id": r.choice([None, 1]),
        "eos_token_id": r.choice([2, [2, 3]]),
        "seed": r.randint(0, 10**9),
    }
    if family in PER_KIND:
        c["rope_parameters"] = {"full_attention": rope(r, limit),
                                "sliding_attention": rope(r, limit, ("default",), (1,))}
    if family in HEAD_DIM:
        if chance(r, 0.3):
            hidden = heads * r.choice([16, 24, 32])
        c["head_dim"] = head_dim
    c["hidden_size"] = hidden
    ADD[family](r, c)
    if chance(r, 0.015):
        c["hidden_act"] = r.choice(["gelu", "relu"])  # refused unless supported
    return c


def random_edits(r, model):
    """What older or other programs write into config.json, with the same meaning or another."""
    edits = {}
    if chance(r, 0.25) and model["family"] != "ministral3":
        edits["old_rope"] = r.choice(["type", "rope_type", "both"])
    if chance(r, 0.25):
        edits["drop"] = r.choice(["rope_parameters", "rms_norm_eps", "max_position_embeddings",
                                  "attention_bias", "sliding_window", "layer_types", "mlp_bias",
                                  "final_logit_softcapping", "attn_logit_softcapping",
                                  "logits_scaling", "embedding_multiplier", "max_window_layers",
                                  "use_sliding_window", "no_rope_layers", "architectures",
                                  "dtype", "hidden_act", "original_max_position_embeddings",
                                  "attention_multiplier", "residual_multiplier",
                                  "position_embedding_type", "query_pre_attn_scalar"])
    if chance(r, 0.15):
        edits["add"] = r.choice([{"rope_scaling": None}, {"rope_theta": 777.0},
                                 {"sliding_window": 4}, {"partial_rotary_factor": 0.5},
                                 {"use_cache": False}, {"attention_dropout": 0.3},
                                 {"pretraining_tp": 2}, {"head_dim": None},
                                 {"layer_types": layer_types(r, model)}])
    return edits


def random_adapter(r, family, layers):
    """The arguments of PEFT's LoraConfig."""
    parts = PARTS.get(family, SEVEN)
    kind = r.choices(["list", "all-linear", "regex"], [6, 1, 2])[0]
    some = sorted(r.sample(parts, r.randint(1, len(parts))))
    c = {
        "r": r.choice([1, 2, 3, 4, 8, 16]),
        "lora_alpha": r.choice([1, 8, 16, 2.5]),
        "lora_dropout": r.choice([0.0, 0.0, 0.1]),
        "use_rslora": chance(r, 0.3),
        "seed": r.randint(0, 10**9),
    }
    if kind == "regex":
        c["target_modules"] = r".*layers\.[0-9]+\..*(" + "|".join(some) + ")"
    else:
        c["target_modules"] = some if kind == "list" else kind
    if chance(r, 0.3):
        c["rank_pattern"] = {r.choice(some): r.choice([1, 5, 7])}
        if chance(r, 0.3):
            c["rank_pattern"][r"layers\.0\..*" + r.choice(some)] = 6
    if chance(r, 0.3):
        c["alpha_pattern"] = {r.choice(some): r.choice([3, 11])}
    if chance(r, 0.2) and kind == "list":
        c["layers_to_transform"] = sorted(r.sample(range(layers), r.randint(1, layers)))
    if chance(r, 0.15) and len(some) > 1 and kind != "all-linear":
        c["exclude_modules"] = r.choice([[some[0]], ".*" + some[0]])
    if chance(r, 0.1):
        c["init_lora_weights"] = "gaussian"
    if chance(r, 0.15):
        c["use_dora"] = True  # refused where a projection has a bias
    if chance(r, 0.01):
        c["init_lora_weights"] = r.choice(["pissa", "olora"])
    if chance(r, 0.01):
        c["bias"] = "lora_only"
    return c


def random_saved(r, c, model):
    """Adds a trained embedding or head, or trained rows of the embedding, and trained norms."""
    tied = model.get("tie_word_embeddings", False)
    if chance(r, 0.1):
        c["modules_to_save"] = r.choice([["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
        if tied:  # copies of a tied matrix cannot be merged
            c["modules_to_save"] = ["embed_tokens"]
            c["ensure_weight_tying"] = True
    elif chance(r, 0.1):
        ids = r.sample(range(model["vocab_size"]), 3)
        c["trainable_token_indices"] = ids
    if chance(r, 0.15):
        c["modules_to_save"] = c.get("modules_to_save", []) + r.choice(
            [["norm"], ["model.norm"], ["input_layernorm", "model.norm"], ["layernorm"],
             ["model.layers.0.post_attention_layernorm"]])


def case_make(seed, number, family=None):
    r = random.Random(f"{seed} {number}")
    model = random_model(r, family)
    edits = random_edits(r, model)
    adapter = None
    if not chance(r, 0.05):
        adapter = random_adapter(r, model["family"], model["num_hidden_layers"])
        random_saved(r, adapter, model)
    count = r.randint(1, min(40, model["max_position_embeddings"] - 1))
    ids = [r.randrange(model["vocab_size"]) for _ in range(count)]
    return {"model": model, "edits": edits, "adapter": adapter, "ids": ids}


def config_edit(c, edits):
    """Applies the edits of a case to the contents of config.json."""
    if edits.get("old_rope") and isinstance(c.get("rope_parameters"), dict):
        new = c.pop("rope_parameters")
        full = new.get("full_attention", new)
        c["rope_theta"] = full.pop("rope_theta", 1e4)
        if "sliding_attention" in new:
            c["rope_local_base_freq"] = new["sliding_attention"].get("rope_theta", 1e4)
        if "partial_rotary_factor" in full:
            c["partial_rotary_factor"] = full.pop("partial_rotary_factor")
        if full.get("rope_type", "default") != "default":
            if edits["old_rope"] != "rope_type":
                full["type"] = full["rope_type"]
            if edits["old_rope"] == "type":
                full.pop("rope_type")
            c["rope_scaling"] = full
    c.pop(edits.get("drop"), None)
    c.update(edits.get("add", {}))
    return c
