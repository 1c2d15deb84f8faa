// The built-in chat formats, as templates: for models without one, and on request. Their
// generation blocks say what is trained.

enum { QLORA__TEXT_MAX_STOPS = QLORA__MAX_STOP_IDS + 2 };

// For records of the form alpaca with an input.
static const char qlora__text_alpaca_system_input[] =
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.";

typedef struct qlora__text_format {
    const char* name;
    const char* end; // tokens that a tokenizer for this format has; NULL: EOS, or none
    const char* marker;
    const char* source;
} qlora__text_format;

// Every template starts with this: only three roles have a place in these formats, and only texts.
#define QLORA__TEXT_ROLES                                                                          \
    "{%- for m in messages %}"                                                                     \
    "{%- if m.role not in ['system', 'user', 'assistant'] %}"                                      \
    "{{- raise_exception('the role \"' ~ m.role ~ '\" is not supported; use system, user or "      \
    "assistant') }}"                                                                               \
    "{%- elif m.content is not string %}"                                                          \
    "{{- raise_exception('a content that is not a string is not supported') }}"                    \
    "{%- endif %}"                                                                                 \
    "{%- endfor %}"
// A format without system messages puts them before the next user message.
#define QLORA__TEXT_MERGED "{%- set ns = namespace(system='') %}"
#define QLORA__TEXT_MERGE                                                                          \
    "{%- if m.role == 'system' %}{%- set ns.system = m.content ~ '\n\n' if m.content else '' %}"
#define QLORA__TEXT_EOS "{{- eos_token if eos_token is defined else '' }}"

static const qlora__text_format qlora__text_formats[] = {
    {"chatml", "<|im_end|>", "<|im_start|>",
     QLORA__TEXT_ROLES
     "{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\n' }}"
     "{%- if m.role == 'assistant' %}"
     "{%- generation %}{{- m.content ~ '<|im_end|>' }}{%- endgeneration %}"
     "{%- else %}{{- m.content ~ '<|im_end|>' }}{%- endif %}{{- '\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"},
    {"llama3", "<|eot_id|>", "<|start_header_id|>",
     QLORA__TEXT_ROLES "{%- for m in messages %}"
                       "{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' }}"
                       "{%- if m.role == 'assistant' %}"
                       "{%- generation %}{{- m.content | trim ~ '<|eot_id|>' }}{%- endgeneration %}"
                       "{%- else %}{{- m.content | trim ~ '<|eot_id|>' }}{%- endif %}{%- endfor %}"
                       "{%- if add_generation_prompt %}"
                       "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"},
    {"mistral", NULL, NULL,
     QLORA__TEXT_ROLES QLORA__TEXT_MERGED
     "{%- for m in messages %}" QLORA__TEXT_MERGE "{%- elif m.role == 'user' %}"
     "{{- '[INST] ' ~ ns.system ~ m.content ~ ' [/INST]' }}{%- set ns.system = '' %}"
     "{%- else %}{%- generation %}{{- ' ' ~ m.content }}" QLORA__TEXT_EOS
     "{%- endgeneration %}{%- endif %}{%- endfor %}"},
    {"gemma", "<end_of_turn>", NULL,
     QLORA__TEXT_ROLES QLORA__TEXT_MERGED
     "{%- for m in messages %}" QLORA__TEXT_MERGE "{%- elif m.role == 'user' %}"
     "{{- '<start_of_turn>user\n' ~ ns.system ~ m.content | trim ~ '<end_of_turn>\n' }}"
     "{%- set ns.system = '' %}"
     "{%- else %}{{- '<start_of_turn>model\n' }}"
     "{%- generation %}{{- m.content | trim ~ '<end_of_turn>' }}{%- endgeneration %}{{- '\n' }}"
     "{%- endif %}{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"},
    {"phi3", "<|end|>", NULL,
     QLORA__TEXT_ROLES "{%- for m in messages %}{{- '<|' ~ m.role ~ '|>\n' }}"
                       "{%- if m.role == 'assistant' %}"
                       "{%- generation %}{{- m.content ~ '<|end|>' }}{%- endgeneration %}"
                       "{%- else %}{{- m.content ~ '<|end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
                       "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"},
    {"zephyr", NULL, NULL,
     QLORA__TEXT_ROLES
     "{%- for m in messages %}{{- '<|' ~ m.role ~ '|>\n' }}{%- if m.role == 'assistant' %}"
     "{%- generation %}{{- m.content }}" QLORA__TEXT_EOS
     "{%- endgeneration %}{%- else %}{{- m.content }}" QLORA__TEXT_EOS
     "{%- endif %}{{- '\n' }}{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"},
    {"alpaca", NULL, NULL,
     QLORA__TEXT_ROLES
     "{%- if not messages or messages[0].role != 'system' %}"
     "{{- 'Below is an instruction that describes a task. Write a response that appropriately "
     "completes the request.\n\n' }}{%- endif %}"
     "{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content ~ '\n\n' }}"
     "{%- elif m.role == 'user' %}{{- '### Instruction:\n' ~ m.content ~ '\n\n' }}"
     "{%- else %}{{- '### Response:\n' }}{%- generation %}{{- m.content }}" QLORA__TEXT_EOS
     "{%- endgeneration %}{{- '\n\n' }}{%- endif %}{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '### Response:\n' }}{%- endif %}"},
    {"plain", NULL, NULL,
     QLORA__TEXT_ROLES "{%- for m in messages %}{%- if m.role == 'assistant' %}"
                       "{%- generation %}{{- m.content }}" QLORA__TEXT_EOS
                       "{%- endgeneration %}{%- else %}{{- m.content }}{%- endif %}{{- '\n' }}"
                       "{%- endfor %}"}};

enum { QLORA__TEXT_ALPACA = 6 };

static QLORA__UNUSED const char* qlora__text_find(const char* text, size_t size, const char* what) {
    size_t length = strlen(what);
    while (size >= length) {
        const char* hit = (const char*)memchr(text, what[0], size - length + 1);
        if (hit == NULL) {
            return NULL;
        }
        if (memcmp(hit, what, length) == 0) {
            return hit;
        }
        size -= (size_t)(hit + 1 - text);
        text = hit + 1;
    }
    return NULL;
}
