/* The entries of linear attention. */
#include "attention_forward.h"
#include "attention_read.h"
#include "threads.h"

/* Compared with the size of its mirror in Python before anything is called. */
int64_t dist_attn_call_bytes(void) { return sizeof(call); }
/* Whether products of bfloat16 tensors are of bfloat16 instructions. */
int64_t dist_attn_half_products(void) { return HALF_PRODUCTS; }
int64_t dist_attn_state_floats(const call *c) { return state_floats(c); }
/* What a thread needs to work in; the same for any length that fits into memory, but for one number a chunk of reads. */
int64_t dist_attn_forward_floats(const call *c) { return round_up(forward_floats(c), 16); }
int64_t dist_attn_backward_floats(const call *c) { return round_up(backward_floats(c), 16); }
void dist_attn_attend(const call *c) { share_out(c, forward_group); }
void dist_attn_attend_backward(const call *c) { share_out(c, backward_group); }
void dist_attn_read(const call *c) { share_out(c, read_group); }
void dist_attn_read_backward(const call *c) { share_out(c, read_backward_group); }
void dist_attn_adjoint_read(const call *c) { share_out(c, adjoint_group); }
