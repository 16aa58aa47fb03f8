//! Connections whose client does not read, or still writes when the answer is there. In: a stream, and how long it may take
//! nothing; out: the same, whose writes fail after that time. The connection ends with the error, and what it was being sent
//! is cancelled. At its end it takes for a short time what the client still sends: a socket that is closed before that answers
//! with a reset, and on some systems a reset throws away the answer (a refusal, as a rule) before it was read.
//! NOT here: connections that send nothing (serve.rs).

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// How long the end of a connection waits for the rest of what the client sends.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes of that rest that are taken; who sends more reads no answer.
const REST: usize = 4 << 20;

/// A stream that waits so long for its reader.
pub struct Unread<S> {
    stream: S,
    limit: Duration,
    /// Bytes that may still be taken after the end; None before it.
    rest: Option<usize>,
    ends: Pin<Box<Sleep>>,
    /// Whether a write is being waited for, since when `ends` counts.
    waiting: bool,
}

impl<S> Unread<S> {
    /// Over a stream.
    pub fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, rest: None, ends: Box::pin(tokio::time::sleep(limit)), waiting: false }
    }

    /// The same, or an error in place of one more wait.
    fn watched<T>(&mut self, written: Poll<Result<T>>, context: &mut Context<'_>) -> Poll<Result<T>> {
        if written.is_ready() {
            self.waiting = false;
            return written;
        }
        if !std::mem::replace(&mut self.waiting, true) {
            self.ends.as_mut().reset(Instant::now() + self.limit);
        }
        ready!(self.ends.as_mut().poll(context));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Unread<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Unread<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watched(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.watched(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        if this.rest.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
            this.rest = Some(REST);
            this.ends.as_mut().reset(Instant::now() + LINGER);
        }
        let mut buffer = [0; 4096];
        while let Some(rest) = this.rest.filter(|&rest| rest > 0) {
            if this.ends.as_mut().poll(context).is_ready() {
                break;
            }
            let mut into = ReadBuf::new(&mut buffer);
            match ready!(Pin::new(&mut this.stream).poll_read(context, &mut into)) {
                Ok(()) if !into.filled().is_empty() => this.rest = Some(rest.saturating_sub(into.filled().len())),
                // The client is done.
                Ok(()) | Err(_) => break,
            }
        }
        this.rest = Some(0);
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use tokio::net::UnixStream;

    async fn write<S: AsyncRead + AsyncWrite + Unpin>(to: &mut Unread<S>, bytes: &[u8]) -> Result<usize> {
        poll_fn(|context| Pin::new(&mut *to).poll_write(context, bytes)).await
    }

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    #[test]
    fn who_does_not_read_is_not_waited_for() {
        run(async {
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let mut ours = Unread::new(ours, Duration::from_millis(50));
            let all = async {
                loop {
                    if let Err(error) = write(&mut ours, &[0; 4096]).await {
                        return error;
                    }
                }
            };
            let error = tokio::time::timeout(Duration::from_secs(30), all).await.expect("it ends");
            assert_eq!(error.kind(), ErrorKind::TimedOut);
        });
    }

    #[test]
    fn who_reads_slowly_is() {
        run(async {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut ours = Unread::new(ours, Duration::from_secs(2));
            let reader = tokio::spawn(async move {
                let (mut got, mut buffer) = (0, vec![0; 1 << 20]);
                while theirs.readable().await.is_ok() {
                    match theirs.try_read(&mut buffer) {
                        Ok(0) => break,
                        Ok(n) => got += n,
                        Err(_) => continue,
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                got
            });
            let mut sent = 0;
            while sent < 4 << 20 {
                sent += write(&mut ours, &[0; 4096]).await.unwrap();
            }
            drop(ours);
            assert_eq!(reader.await.unwrap(), sent);
        });
    }

    #[test]
    fn who_still_writes_reads_the_answer() {
        run(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let client = tokio::task::spawn_blocking(move || {
                use std::io::{Read as _, Write as _};
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                for _ in 0..32 {
                    stream.write_all(&[0; 32 << 10]).expect("no reset");
                    std::thread::sleep(Duration::from_millis(2));
                }
                let mut answer = String::new();
                stream.read_to_string(&mut answer).expect("no reset");
                answer
            });
            let (ours, _) = listener.accept().await.unwrap();
            let mut ours = Unread::new(ours, Duration::from_secs(30));
            write(&mut ours, b"no").await.unwrap();
            poll_fn(|context| Pin::new(&mut ours).poll_shutdown(context)).await.unwrap();
            drop(ours);
            assert_eq!(client.await.unwrap(), "no");
        });
    }

    #[test]
    fn who_never_ends_is_let_go() {
        run(async {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut ours = Unread::new(ours, Duration::from_secs(30));
            let end = poll_fn(|context| Pin::new(&mut ours).poll_shutdown(context));
            tokio::time::timeout(Duration::from_secs(20), end).await.expect("it ends").unwrap();
            drop(theirs);
        });
    }
}
