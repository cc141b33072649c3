// llama_logits FILE TOKEN...: llama.cpp's logits after each token, as float32 on stdout. On the CPU, with keys and
// values in f32 and no fused attention, so that rounding is that of f32 wherever the weights of the file are.
#include <llama.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int count, char** words) {
  if (count < 3) return 2;
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  llama_model_params of_model = llama_model_default_params();
  of_model.n_gpu_layers = 0;
  of_model.use_extra_bufts = false;
  llama_model* model = llama_model_load_from_file(words[1], of_model);
  if (!model) return 1;

  std::vector<llama_token> tokens;
  for (int i = 2; i < count; ++i) tokens.push_back(std::atoi(words[i]));
  llama_context_params of_context = llama_context_default_params();
  of_context.n_ctx = 512;
  of_context.n_threads = of_context.n_threads_batch = 1;
  of_context.type_k = of_context.type_v = GGML_TYPE_F32;
  of_context.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context* context = llama_init_from_model(model, of_context);
  if (!context) return 1;

  llama_batch batch = llama_batch_init(static_cast<int32_t>(tokens.size()), 0, 1);
  for (size_t i = 0; i < tokens.size(); ++i) {
    batch.token[i] = tokens[i];
    batch.pos[i] = static_cast<llama_pos>(i);
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  batch.n_tokens = static_cast<int32_t>(tokens.size());
  if (llama_decode(context, batch) != 0) return 1;
  const auto vocab = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
  for (size_t i = 0; i < tokens.size(); ++i)
    std::fwrite(llama_get_logits_ith(context, static_cast<int32_t>(i)), sizeof(float), vocab, stdout);
  llama_batch_free(batch);
  llama_free(context);
  llama_model_free(model);
}
