// Times ggml's attention over a cache, one query token, on the CPU: the rows of llama.cpp and ik_llama.cpp beside `kvant bench attend`.
//
// In: a shape and cache types; out: one JSON object on stdout: minimum and median wall time, bytes, error against attention in
// f64 over the same (dequantized) rows. Cold: each type rotates over copies of 600 MB or more. Rounds are interleaved as in
// crates/roofline/src/timer.rs: each runs every type once, and the first one changes.
// NOT here: a kernel, a model. build.sh compiles it against the ggml of either rival; RIVAL is its name and version.

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#ifndef OLD_GGML
#include "ggml-cpu.h"
#endif

static const size_t COLD_BYTES = 600000000; // as kvant's timer
static const size_t HUGE_PAGE = 2 << 20;
static const size_t LEAST_ROUNDS = 7, MOST_ROUNDS = 200;
static const double WORST_ERROR = 0.05; // more means that something else was computed; accuracy itself is a column of the table

[[noreturn]] static void fail(const std::string & what, const std::string & hint) {
    fprintf(stderr, "error: %s\nhint: %s\n", what.c_str(), hint.c_str());
    exit(2);
}

// Zeroed memory that asks for huge pages, as kvant's blocks do.
static char * allocate(size_t bytes) {
    const size_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void * p = mmap(nullptr, whole + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fail("there is not enough memory", "take fewer types or a shorter cache");
    char * aligned = (char *) (((uintptr_t) p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(aligned, whole, MADV_HUGEPAGE);
    return aligned;
}

// About normal, the same in every run.
static std::vector<float> draw(size_t count, uint64_t state) {
    std::vector<float> values(count);
    for (float & x : values) {
        float sum = 0;
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        for (int part = 0; part < 4; part++) sum += (float) ((state >> (16 + 12 * part)) & 0xfff) / 4096.0f;
        x = (sum - 2.0f) * 1.7320508f;
    }
    return values;
}

struct Shape {
    int64_t q_heads = 0, kv_heads = 0, head_dim = 0, kv_len = 0;
};

static Shape parse_shape(const std::string & text) {
    Shape s;
    char rest;
    if (sscanf(text.c_str(), "q=%ld,kv=%ld,d=%ld,s=%ld%c", &s.q_heads, &s.kv_heads, &s.head_dim, &s.kv_len, &rest) != 4 ||
        s.q_heads < 1 || s.kv_heads < 1 || s.head_dim < 32 || s.head_dim % 32 || s.head_dim > 512 || s.q_heads % s.kv_heads ||
        s.kv_len < 1 || s.kv_len % 256 || s.kv_len > 1 << 20) {
        fail("the shape '" + text + "' is not one", "q=32,kv=8,d=128,s=16384: q a multiple of kv, d of 32, s of 256 (as their caches are padded)");
    }
    return s;
}

static ggml_type parse_type(const std::string & name) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char * known = ggml_type_name((ggml_type) t);
        if (known && !strcasecmp(known, name.c_str())) return (ggml_type) t;
    }
    fail("this ggml has no type '" + name + "'", "f16, q8_0, q4_0; q8_KV with ik_llama.cpp");
}

static ggml_to_float_t to_float(ggml_type type) {
#ifdef OLD_GGML
    return ggml_internal_get_type_traits(type).to_float;
#else
    return ggml_get_type_traits(type)->to_float;
#endif
}

static size_t cache_bytes(ggml_type type, const Shape & s) {
    return 2 * ggml_row_size(type, s.head_dim) * s.kv_heads * s.kv_len;
}

static size_t cold_copies(size_t bytes) {
    return std::max<size_t>(2, (COLD_BYTES + bytes - 1) / bytes);
}

// Memory that is only promised would end this process, or another one, later.
static void check_memory(const std::vector<ggml_type> & types, const Shape & s) {
    size_t need = 2 * s.kv_heads * s.kv_len * s.head_dim * sizeof(float);
    for (ggml_type type : types) need += cold_copies(cache_bytes(type, s)) * cache_bytes(type, s);
    FILE * file = fopen("/proc/meminfo", "r");
    char line[200];
    size_t kib;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1 && need / 1024 > kib) {
            fail("this needs " + std::to_string(need >> 20) + " MiB of memory, and " + std::to_string(kib >> 10) + " MiB are available",
                 "take fewer types or a shorter cache");
        }
    }
    if (file) fclose(file);
}

// One cache type with its copies; each copy has a graph of one node.
struct Subject {
    ggml_type type;
    size_t bytes = 0;
    std::vector<ggml_cgraph *> graphs;
    ggml_tensor * out = nullptr;
    std::vector<int64_t> ns;
    double error = 0;
};

// The rows of K and of V as floats lie head by head: [kv_heads, kv_len, head_dim].
static Subject fill(ggml_type type, const Shape & s, bool token_major, const std::vector<float> & q, const std::vector<float> * kv) {
    Subject subject;
    subject.type = type;
    subject.bytes = cache_bytes(type, s);
    const size_t row = ggml_row_size(type, s.head_dim), half = subject.bytes / 2, copies = cold_copies(subject.bytes);
    char * first = nullptr;
    // One context for all copies: older ggml has 64 of them in all.
    ggml_context * ctx = ggml_init({ copies * (ggml_tensor_overhead() * 16 + ggml_graph_overhead()) + 4096, nullptr, true });
    if (!ctx) fail("ggml gave no context", "take fewer types");
    for (size_t copy = 0; copy < copies; copy++) {
        char * data = allocate(subject.bytes);
        ggml_tensor * sides[2];
        for (int side = 0; side < 2; side++) {
            // Token by token with the heads side by side is how their own caches lie; head by head is the faster layout.
            ggml_tensor * t = token_major ? ggml_new_tensor_3d(ctx, type, s.head_dim, s.kv_heads, s.kv_len)
                                          : ggml_new_tensor_3d(ctx, type, s.head_dim, s.kv_len, s.kv_heads);
            t->nb[1] = row;
            t->nb[2] = row * (token_major ? s.kv_heads : s.kv_len);
            t->nb[3] = half;
            t->data = data + side * half;
            sides[side] = token_major ? ggml_permute(ctx, t, 0, 2, 1, 3) : t;
            sides[side]->data = t->data;
            if (copy == 0) {
                for (int64_t h = 0; h < s.kv_heads; h++) {
                    for (int64_t j = 0; j < s.kv_len; j++) {
                        char * to = (char *) t->data + row * (token_major ? j * s.kv_heads + h : h * s.kv_len + j);
                        ggml_quantize_chunk(type, kv[side].data() + (h * s.kv_len + j) * s.head_dim, to, 0, 1, s.head_dim, nullptr);
                    }
                }
            }
        }
        if (copy == 0) first = data;
        else memcpy(data, first, subject.bytes);
        ggml_tensor * queries = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.head_dim, 1, s.q_heads);
        queries->data = allocate(ggml_nbytes(queries));
        memcpy(queries->data, q.data(), ggml_nbytes(queries));
        // A mask is what both rivals always pass when they decode; rows beyond the first are the padding that older ggml asks for.
        ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, s.kv_len, 64);
        mask->data = allocate(ggml_nbytes(mask));
        ggml_tensor * out = ggml_flash_attn_ext(ctx, queries, sides[0], sides[1], mask, 1.0f / std::sqrt((float) s.head_dim), 0.0f, 0.0f);
        out->data = allocate(ggml_nbytes(out));
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, out);
        subject.graphs.push_back(graph);
        if (copy == 0) subject.out = out;
    }
    return subject;
}

// Relative L2 error of the first copy's output against f64 attention over the rows as stored.
static double relative_error(const Subject & subject, const Shape & s, const std::vector<float> & q) {
    const ggml_tensor * attn = subject.out;
    const ggml_to_float_t decode = to_float(subject.type);
    if (!decode) fail(std::string("ggml cannot dequantize ") + ggml_type_name(subject.type), "take another type");
    double wrong = 0, all = 0;
    const int64_t d = s.head_dim, ratio = s.q_heads / s.kv_heads;
    std::vector<float> x(d);
    for (int64_t h = 0; h < s.kv_heads; h++) {
        std::vector<double> logits(ratio * s.kv_len), want(ratio * d, 0.0);
        const auto at = [&](int side, int64_t j) {
            const ggml_tensor * t = attn->src[1 + side];
            decode((const char *) t->data + j * t->nb[1] + h * t->nb[2], x.data(), d);
        };
        for (int64_t j = 0; j < s.kv_len; j++) {
            at(0, j);
            for (int64_t r = 0; r < ratio; r++) {
                double dot = 0;
                for (int64_t c = 0; c < d; c++) dot += (double) x[c] * q[(h * ratio + r) * d + c];
                logits[r * s.kv_len + j] = dot / std::sqrt((double) d);
            }
        }
        for (int64_t r = 0; r < ratio; r++) {
            double * l = &logits[r * s.kv_len], most = *std::max_element(l, l + s.kv_len), sum = 0;
            for (int64_t j = 0; j < s.kv_len; j++) sum += l[j] = std::exp(l[j] - most);
            for (int64_t j = 0; j < s.kv_len; j++) l[j] /= sum;
        }
        for (int64_t j = 0; j < s.kv_len; j++) {
            at(1, j);
            for (int64_t r = 0; r < ratio; r++) {
                for (int64_t c = 0; c < d; c++) want[r * d + c] += logits[r * s.kv_len + j] * x[c];
            }
        }
        const float * got = (const float *) attn->data + h * ratio * d;
        for (int64_t i = 0; i < ratio * d; i++) {
            wrong += (got[i] - want[i]) * (got[i] - want[i]);
            all += want[i] * want[i];
        }
    }
    return std::sqrt(wrong / all);
}

static int64_t once(ggml_backend_t cpu, ggml_cgraph * graph) {
    const auto start = std::chrono::steady_clock::now();
    if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) fail("ggml did not compute the graph", "take another type");
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

int main(int argc, char ** argv) {
    const std::string usage = "ggml_attend q=32,kv=8,d=128,s=16384 f16,q8_0,q4_0 [--threads 2] [--seconds 2] [--layout head|token]";
    if (argc < 3 || argc % 2 == 0) fail("a shape and types are needed", usage);
    const Shape s = parse_shape(argv[1]);
    int threads = 2;
    double seconds = 2; // for each type
    bool token_major = false;
    for (int i = 3; i < argc; i += 2) {
        const std::string flag = argv[i], value = argv[i + 1];
        if (flag == "--threads" && atoi(value.c_str()) > 0) threads = atoi(value.c_str());
        else if (flag == "--seconds" && atof(value.c_str()) > 0) seconds = atof(value.c_str());
        else if (flag == "--layout" && (value == "token" || value == "head")) token_major = value == "token";
        else fail("'" + flag + " " + value + "' is not understood", usage);
    }
    std::vector<ggml_type> types;
    for (std::string list = argv[2]; !list.empty();) {
        const size_t comma = std::min(list.find(','), list.size());
        types.push_back(parse_type(list.substr(0, comma)));
        list.erase(0, comma + 1);
    }

    check_memory(types, s);

    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, threads);
    const std::vector<float> q = draw(s.q_heads * s.head_dim, 1);
    const size_t values = s.kv_heads * s.kv_len * s.head_dim;
    const std::vector<float> kv[2] = { draw(values, 2), draw(values, 3) };
    std::vector<Subject> subjects;
    for (ggml_type type : types) subjects.push_back(fill(type, s, token_major, q, kv));
    for (Subject & subject : subjects) {
        once(cpu, subject.graphs[0]);
        subject.error = relative_error(subject, s, q);
        if (!(subject.error <= WORST_ERROR)) {
            fail(std::string(ggml_type_name(subject.type)) + " has a relative error of " + std::to_string(subject.error), "nothing was timed");
        }
    }

    const auto start = std::chrono::steady_clock::now();
    const auto spent = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
    size_t round = 0;
    while (round < LEAST_ROUNDS || (round < MOST_ROUNDS && spent() < seconds * subjects.size())) {
        for (size_t turn = 0; turn < subjects.size(); turn++) {
            Subject & subject = subjects[(turn + round) % subjects.size()];
            subject.ns.push_back(once(cpu, subject.graphs[(round + 1) % subject.graphs.size()]));
        }
        round++;
    }

    printf("{\"rival\": \"%s\", \"q_heads\": %ld, \"kv_heads\": %ld, \"head_dim\": %ld, \"kv_len\": %ld, \"threads\": %d, \"cold\": true,\n", RIVAL,
           s.q_heads, s.kv_heads, s.head_dim, s.kv_len, threads);
    printf(" \"layout\": \"%s\", \"avx512\": %d, \"avx512_vnni\": %d, \"avx512_bf16\": %d, \"rounds\": %zu, \"rows\": [", token_major ? "token" : "head",
           ggml_cpu_has_avx512(), ggml_cpu_has_avx512_vnni(), ggml_cpu_has_avx512_bf16(), round);
    for (size_t i = 0; i < subjects.size(); i++) {
        Subject & subject = subjects[i];
        std::sort(subject.ns.begin(), subject.ns.end());
        printf("%s\n  {\"kv\": \"%s\", \"min_ns\": %ld, \"median_ns\": %ld, \"bytes\": %zu, \"copies\": %zu, \"rel_err\": %.3g}", i ? "," : "",
               ggml_type_name(subject.type), subject.ns.front(), subject.ns[subject.ns.size() / 2], subject.bytes, subject.graphs.size(), subject.error);
    }
    printf("\n ]}\n");
}
