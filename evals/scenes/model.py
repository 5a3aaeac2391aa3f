"""The small vision-language model of the scenes, built from stock classes, and its words."""

from __future__ import annotations

from typing import Any

from .generator import COLOURS, COLUMNS, PATCH, ROWS, SHAPES, SIZE, WORDS

PAD, BOS, EOS, IMAGE, ANSWER, UNKNOWN = "<pad>", "<bos>", "<eos>", "<image>", "<answer>", "<unk>"
_QUESTION_WORDS = "what color is the ? shape how many objects are there a where digit shown word yes no"
_WORDS = (*_QUESTION_WORDS.split(), *SHAPES, *COLOURS, *WORDS, *ROWS, *COLUMNS, *map(str, range(10)))
VOCABULARY = (PAD, BOS, EOS, IMAGE, ANSWER, UNKNOWN, *dict.fromkeys(_WORDS))
IDS = {word: index for index, word in enumerate(VOCABULARY)}

# An image, a question, and the mark after which the answer follows.
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% else %}{{ '<answer>' }}{{ message['content'][0]['text'] }}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<answer>' }}{% endif %}"
)


def build_model() -> Any:
    """Return a freshly initialised `LlavaForConditionalGeneration` of about 4.6 million parameters."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=PATCH,
        projection_dim=192,
        hidden_act="gelu",
    )
    text = Qwen2Config(
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(VOCABULARY),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=IDS[PAD],
        bos_token_id=IDS[BOS],
        eos_token_id=IDS[EOS],
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IDS[IMAGE],
        image_seq_length=(SIZE // PATCH) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def build_processor() -> Any:
    """Return the processor of the model, with its tokenizer and chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[IMAGE, ANSWER],
        padding_side="left",
    )
    images = CLIPImageProcessor(
        size={"height": SIZE, "width": SIZE},
        do_center_crop=False,
        do_resize=True,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.25, 0.25, 0.25],
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )
