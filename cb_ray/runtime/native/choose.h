// Choosing one token of a row of logits: the greatest, or drawn after temperature, top-k, top-p and min-p. Included by kernels.cpp
// inside a level's namespace.
//
//   scores   = logits / temperature                         one pass, kept as floats
//   lowest   = the least score that top-k, top-p and min-p keep; ties with it stay
//   weights  = e^(scores - greatest) where scores >= lowest, added up block by block in vocabulary order
//   the token is where the sum first exceeds number * total: number is uniform in [0, 1)
//
// Nothing is sorted: the k-th score and the score at which enough probability has been seen are found by dividing the scores that
// can matter again and again, which takes time in proportion to their number.

template <class T>
static inline float number_at(const T* at) {
  T one[W] = {*at};
  float lanes[W];
  store(lanes, load(one));
  return lanes[0];
}

// Two passes: the greatest of the row, four vectors at a time, then the first place where it stands.
template <class T>
static int64_t greatest_of(const T* row, int64_t columns, float* value) {
  const F low = set1(-__builtin_inff()), least = set1(-__FLT_MAX__);
  F best[4] = {low, low, low, low}, broken = zero();
  int64_t i = 0;
  for (; i + 4 * W <= columns; i += 4 * W)
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      const F x = load(row + i + k * W);
      best[k] = max(x, best[k]);
      broken = add(broken, mul(max(least, x), zero()));
    }
  float highest = top(max(max(best[0], best[1]), max(best[2], best[3])));
  bool usual = sum(broken) == 0.0f;  // no NaN and no +inf so far; -inf is usual: what a grammar forbids has it
  for (; i < columns; i++) {
    const float x = number_at(row + i);
    usual = usual && x <= __FLT_MAX__;
    highest = x > highest ? x : highest;
  }
  if (!usual)
    for (i = 0; i < columns; i++)
      if (*value = number_at(row + i); *value != *value) return i;
  *value = highest;
  for (i = 0; i + W <= columns; i += W) {
    float lanes[W];
    const F x = load(row + i);
    if (top(x) != highest) continue;
    store(lanes, x);
    for (int k = 0; k < W; k++)
      if (lanes[k] == highest) return i + k;
  }
  for (; i < columns; i++)
    if (number_at(row + i) == highest) return i;
  return 0;
}

constexpr int kBlock = 64;  // scores whose weights are added up as floats before they join the total

static inline float weight_of(float score, float highest) {
  float lanes[W];
  store(lanes, exponential(set1(score - highest)));
  return lanes[0];
}

// The sum of the weights of scores [at, at + kBlock) that are not below `lowest`.
static inline float block_weight(const float* scores, F highest, F lowest) {
  F total = zero();
  for (int i = 0; i < kBlock; i += W) {
    const F x = load(scores + i);
    total = add(total, pick_less(x, lowest, zero(), exponential(sub(x, highest))));
  }
  return sum(total);
}

// Scores from `floor` on and their weights, in any order; returns how many.
static int64_t gather_from(const float* scores, int64_t columns, float floor, float highest, float* found, float* weights) {
  int64_t count = 0;
  const F edge = set1(floor);
  for (int64_t i = 0; i < columns; i += W) {
    const F x = load(scores + i);
    if (top(sub(x, edge)) < 0) continue;
    for (int k = 0; k < W; k++) {
      found[count] = scores[i + k];
      count += scores[i + k] >= floor;
    }
  }
  for (int64_t i = 0; i < count; i += W) store(weights + i, exponential(sub(load(found + i), set1(highest))));
  return count;
}

// The middle one of three, so that the sorted and the nearly equal do not make dividing slow.
static inline float middle(float a, float b, float c) {
  if (a < b) return b < c ? b : a < c ? c : a;
  return a < c ? a : b < c ? c : b;
}

// What is kept: the likeliest until they are `count` or have the weight `mass` (whichever is set), but at least `fewest`.
struct Quota {
  int64_t count;
  double mass;
  int64_t fewest;
};

// The least score that is kept of s[0 .. n); all are, if the quota asks for more than there is. Reorders both arrays.
static float divide(float* s, float* w, int64_t n, Quota quota) {
  const auto enough = [&](int64_t members, double weight) {
    return members >= quota.fewest && (quota.mass > 0 ? weight >= quota.mass : members >= quota.count);
  };
  const auto swap = [&](int64_t i, int64_t j) {
    const float score = s[i], weight = w[i];
    s[i] = s[j], w[i] = w[j];
    s[j] = score, w[j] = weight;
  };
  int64_t members = 0;  // of what is likelier than all of s[0 .. n)
  double weight = 0.0;
  float least = s[0];
  while (n > 0) {
    const float pivot = middle(s[0], s[n / 2], s[n - 1]);
    int64_t above = 0, equal = 0;  // s = [above | equal | rest]
    double weight_above = 0.0, weight_equal = 0.0;
    for (int64_t i = 0; i < n; i++) {
      if (s[i] < pivot) continue;
      if (s[i] > pivot) {
        weight_above += w[i];
        swap(i, above + equal);
        if (equal) swap(above + equal, above);
        above++;
      } else {
        weight_equal += w[i];
        swap(i, above + equal);
        equal++;
      }
    }
    if (above && enough(members + above, weight + weight_above)) {
      n = above;
      continue;
    }
    least = pivot;
    if (enough(members + above + equal, weight + weight_above + weight_equal)) return pivot;
    members += above + equal;
    weight += weight_above + weight_equal;
    s += above + equal;
    w += above + equal;
    n -= above + equal;
  }
  return least;
}

static double weight_from(const float* scores, int64_t columns, float floor, float highest) {
  double total = 0.0;
  for (int64_t i = 0; i < columns; i += kBlock) total += block_weight(scores + i, set1(highest), set1(floor));
  return total;
}

static int64_t count_from(const float* scores, int64_t columns, float floor) {
  F total = zero();
  for (int64_t i = 0; i < columns; i += W) total = add(total, pick_less(load(scores + i), set1(floor), zero(), set1(1.0f)));
  return int64_t(sum(total));
}

// A score not above the one that ends the quota, and as near to it as a few cheap looks can tell: what is below needs no dividing.
static float floor_for(const float* scores, int64_t columns, Quota quota, float highest) {
  constexpr float depths[] = {2.0f, 4.0f, 6.0f, 9.0f, 13.0f, 20.0f};
  for (const float depth : depths) {
    const float floor = highest - depth;
    if (count_from(scores, columns, floor) < (quota.fewest > quota.count ? quota.fewest : quota.count)) continue;
    if (quota.mass <= 0 || weight_from(scores, columns, floor, highest) >= quota.mass * 1.0001) return floor;
  }
  return -__builtin_inff();
}

// The least score that a row's wishes keep. `found` and `weights` have room for all columns.
static float lowest_kept(const Choice& c, int64_t r, const float* scores, int64_t columns, float highest, float* found, float* weights) {
  const int64_t top_k = c.top_k[r] > 0 && c.top_k[r] < columns ? c.top_k[r] : 0;
  const float top_p = c.top_p[r], min_p = c.min_p[r];
  float lowest = -__builtin_inff();
  if (top_k) {
    const Quota quota = {top_k, 0.0, 0};
    const float floor = floor_for(scores, columns, quota, highest);
    lowest = divide(found, weights, gather_from(scores, columns, floor, highest, found, weights), quota);
  }
  if (top_p < 1.0f) {
    const Quota quota = {0, double(top_p) * weight_from(scores, columns, lowest, highest), c.fewest[r]};
    const float floor = floor_for(scores, columns, quota, highest), from = floor > lowest ? floor : lowest;
    const float cut = divide(found, weights, gather_from(scores, columns, from, highest, found, weights), quota);
    lowest = cut > lowest ? cut : lowest;
  }
  const float least_p = min_p > 0 ? highest + __builtin_logf(min_p) : -__builtin_inff();
  return lowest > least_p ? lowest : least_p;
}

template <class T>
static void choose_row(const Choice& c, int64_t r, float* scores, float* found, float* weights) {
  const T* row = (const T*)c.logits + r * c.stride;
  c.tokens[r] = greatest_of(row, c.columns, c.best + r);
  const float temperature = c.temperature[r], best = c.best[r];
  if (!(temperature > 0) || best - best != 0.0f) return;  // greedy; or not a number, which the caller reports
  const int64_t whole = (c.columns + kBlock - 1) / kBlock * kBlock;
  const F divisor = set1(temperature);
  int64_t i = 0;
  for (; i + W <= c.columns; i += W) store(scores + i, div(load(row + i), divisor));
  for (; i < whole; i++) {
    float lanes[W];
    store(lanes, div(set1(i < c.columns ? number_at(row + i) : -__builtin_inff()), divisor));
    scores[i] = lanes[0];
  }
  float lanes[W];
  store(lanes, div(set1(best), divisor));
  const float highest = lanes[0];
  const F top_score = set1(highest);
  const float lowest = lowest_kept(c, r, scores, whole, highest, found, weights);
  float* blocks = found;
  double total = 0.0;
  for (i = 0; i < whole; i += kBlock) total += blocks[i / kBlock] = block_weight(scores + i, top_score, set1(lowest));
  const double target = c.numbers[r] * total;
  double seen = 0.0;
  int64_t last = c.tokens[r];  // rounding may leave the target just beyond the sum: then the last that has a weight
  for (i = 0; i < whole; i += kBlock) {
    const double after = seen + blocks[i / kBlock];
    if (after <= target || blocks[i / kBlock] == 0.0f) {
      seen = after;
      continue;
    }
    for (int64_t k = i; k < i + kBlock; k++) {
      if (scores[k] < lowest) continue;
      const float weight = weight_of(scores[k], highest);
      if (weight == 0.0f) continue;
      seen += weight;
      last = k;
      if (seen > target) {
        c.tokens[r] = k;
        return;
      }
    }
  }
  c.tokens[r] = last;
}

template <class T>
static void choose_as(const Choice& c, int64_t begin, int64_t end, float* memory) {
  const int64_t whole = (c.columns + kBlock - 1) / kBlock * kBlock;
  for (int64_t r = begin; r < end; r++) choose_row<T>(c, r, memory, memory + whole + kBlock, memory + 2 * (whole + kBlock));
}
