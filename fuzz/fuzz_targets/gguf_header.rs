//! Model files. In: any bytes behind the magic of a GGUF; out: a refusal, or a file whose numbers, tokenizer and chat template
//! can be asked for. Never a panic, never more memory than the file is long by orders of magnitude.
#![no_main]

use kvant_engine::Source;
use libfuzzer_sys::fuzz_target;
use std::io::Write;

fuzz_target!(|data: &[u8]| {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary folder");
    file.write_all(b"GGUF").and_then(|()| file.write_all(data)).expect("a temporary folder");
    if let Ok(source) = Source::open(file.path()) {
        let _ = source.config();
        let _ = source.chat_template();
        if let Ok(Some(tokenizer)) = source.tokenizer() {
            let tokens = tokenizer.encode("Hello, 1234 w\u{f6}rld!\n").unwrap_or_default();
            let _ = tokenizer.decode(&tokens);
        }
    }
});
