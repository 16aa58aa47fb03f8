//! Bodies of requests. In: any bytes; out: taken or refused, as a chat and as a completion. Never a panic, and no more work than
//! the body is long.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    let _ = kvant_server::takes(body);
});
