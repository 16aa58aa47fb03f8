# One line per recipe; CI (.ci/run) calls these same targets.
.PHONY: demo pull test fmt lint doc bench record readme ci

demo: ; @cargo run --release --locked -p kvant-cli -- demo
pull: ; @cargo run --locked -p kvant-cli -- pull
test: ; @bash .ci/test
fmt: ; cargo fmt --all --check && rustfmt --edition 2024 --check crates/cli/tests/stand_in/cuda.rs
lint: ; cargo clippy --workspace --all-targets --locked -- -D warnings
doc: ; RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
bench: ; cargo run --release --locked -p kvant-cli -- bench --test
record: ; python3 benches/record.py measure
readme: ; python3 benches/record.py readme
ci: ; @bash .ci/run
