"""Model types that are refused, and the reason. No jax."""

ENCODER = "it is an encoder, which attends in one pass and keeps no cache"
CODES = "its positions are audio codes of several tokens each, next to codes of its input"
FRAMES = "its encoder reads audio frames, and its configuration does not name their number"
SEES = "it is an encoder of images or sounds, which attends in one pass and keeps no cache"
DENOISES = "it denoises a text, or a block of it, at once and appends no tokens"
OTHER_ENCODER = "it combines two models, and its cache depends on the other one"
OWN_STATE = "its recurrent state has a form that no layer spec describes"
DRAFT = "it drafts for another model and reads that model's cache"
IMAGES = "its layers attend to an encoder of images or molecules in a form of their own"


def _all(types: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(types.split(), reason)


REFUSED = {
    **_all(
        """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert
        roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod
        distilbert albert deberta deberta-v2 mpnet modernbert eurobert longformer nomic_bert
        embedding_gemma2 convbert esm flaubert fnet funnel ibert jina_embeddings_v3 layoutlm
        layoutlmv2 layoutlmv3 lfm2_bidirectional luke mobilebert mra new nystromformer splinter
        squeezebert yoso
        """,
        ENCODER,
    ),
    **_all(
        """
        beit chinese_clip clap clip convnext convnextv2 data2vec-audio data2vec-vision deit
        depth_anything detr dinov2 dinov3_convnext dinov3_vit grounding-dino hiera hubert
        mask2former parakeet_ctc parakeet_encoder resnet rf_detr rt_detr sam sam2 sam3 segformer
        siglip siglip2 swin swinv2 unispeech vit vjepa2 wav2vec2 wav2vec2-bert wavlm
        """,
        SEES,
    ),
    **_all("Dream llada llada2_moe sdar sdar_moe", DENOISES),
    **_all("moshi musicgen musicgen_melody csm dia bark kyutai_speech_to_text vibevoice", CODES),
    **_all(
        """
        canary cohere_asr moonshine moonshine_streaming pop2piano seamless_m4t seamless_m4t_v2
        speech_to_text speecht5
        """,
        FRAMES,
    ),
    **_all("trocr encoder-decoder speech-encoder-decoder vision-encoder-decoder", OTHER_ENCODER),
    **_all("rwkv rwkv5 rwkv6 rwkv7 xlstm zaya", OWN_STATE),
    **_all("gemma4_assistant gemma4_unified_assistant muse_glimmer_assistant", DRAFT),
    **_all("blip evolla florence2 idefics pix2struct pp_formulanet udop", IMAGES),
    **_all("t5gemma t5gemma2", "its decoder attends to itself and to its encoder at once"),
    "voxtral_realtime": "its audio encoder keeps a cache of its own",
    "pi0": "it keeps a cache for its language model and another for its actions",
    "blt": "it keeps caches for bytes and for patches of bytes, whose length depends on the text",
    "cpmant": "its attention is not causal over the prompt, so no prefix can be kept in steps",
    "xlnet": "it attends in permuted order and keeps a memory of hidden states, not keys",
    "reformer": "it hashes tokens into buckets and keeps hidden states, not keys",
    "openai-gpt": "its class keeps no cache",
    "prophetnet": "its decoder predicts several tokens at once and keeps a stream for each",
    "diffusion_gemma_text": "it denoises a whole text at once and appends no tokens",
    "hrm_text": "every cycle of its layers keeps a cache, and files count layers in two ways",
    "modernbert-decoder": "its files name its window in two ways, whole and half",
    "unlimited_ocr_text": "its windows keep the reference tokens too, outside of any window",
}
