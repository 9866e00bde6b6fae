/* The entries of affine recurrences. */
#include "affine_backward.h"
#include "threads.h"

/* Compared with the size of its mirror in Python before anything is called. */
int64_t dist_attn_call_bytes(void) { return sizeof(call); }
/* Whether products of bfloat16 tensors are of bfloat16 instructions. */
int64_t dist_attn_half_products(void) { return HALF_PRODUCTS; }
int64_t dist_attn_state_floats(const call *c) { return round_up(state_floats(c), 16); }
/* What a thread needs to work in; the same for any length that fits into memory. */
int64_t dist_attn_forward_floats(const call *c) { return round_up(forward_floats(c), 16); }
int64_t dist_attn_backward_floats(const call *c) { return round_up(backward_floats(c), 16); }
void dist_attn_recur(const call *c) { share_out(c, forward_group); }
void dist_attn_recur_backward(const call *c) { share_out(c, backward_group); }
