//! Where clients come in. In: addresses; out: a listener for [`crate::Server::run`].
//! NOT here: what is done with connections (serve.rs).

use socket2::{Domain, Protocol, Socket, Type};
use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

/// Connections that the system keeps until they are accepted; it may set a lower bound of its own (on Linux
/// `net.core.somaxconn`). The 128 of `std::net::TcpListener` are too few for a storm of clients: when they are full, Linux
/// lets clients believe that they are connected, and may answer what they send with a reset.
const BACKLOG: i32 = 4096;

/// Listens on the first of the addresses that can be had. The listener does not block, as tokio wants it.
///
/// # Errors
/// Those of the system for the last address; `InvalidInput` when there is none.
pub fn listen(addresses: impl ToSocketAddrs) -> Result<TcpListener> {
    let mut why = Error::new(ErrorKind::InvalidInput, "no address to listen on");
    for address in addresses.to_socket_addrs()? {
        match listen_on(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => why = error,
        }
    }
    Err(why)
}

fn listen_on(address: SocketAddr) -> Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A server that starts again takes its port although connections of the one before it are still ending. (On Windows
    // the option means something else.)
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;
    use std::time::Duration;

    const CLIENTS: usize = 300;

    /// Connections that the system keeps at most.
    fn most_kept() -> usize {
        let text = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    #[test]
    fn more_clients_than_std_keeps_are_connected_before_any_is_accepted() {
        if most_kept() < CLIENTS {
            println!("skipped: this system keeps {} connections", most_kept());
            return;
        }
        let listener = listen("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // Less than a second, after which what was dropped is sent again.
        let connect = |_| TcpStream::connect_timeout(&address, Duration::from_millis(900)).expect("it is kept");
        let clients: Vec<TcpStream> = (0..CLIENTS).map(connect).collect();
        for _ in &clients {
            // Kept ones can be accepted at once.
            listener.accept().expect("it was connected");
        }
    }

    #[test]
    fn an_address_that_is_taken_is_passed_over_and_named_when_it_is_the_last() {
        let first = listen("127.0.0.1:0").unwrap();
        let taken = first.local_addr().unwrap();
        let free: SocketAddr = "127.0.0.1:0".parse().unwrap();
        assert_ne!(listen(&[taken, free][..]).unwrap().local_addr().unwrap(), taken);
        assert_eq!(listen(taken).unwrap_err().kind(), ErrorKind::AddrInUse);
        assert_eq!(listen(&[][..] as &[SocketAddr]).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
